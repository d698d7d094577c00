"""What runs in the process that packs, with a descriptor and the engine's cores as its arguments.

The socket of that descriptor brings a line with the model's layout, then a line for each job; each is
answered with a line, to which the descriptor of the packed adapter's memory is attached. The process ends
with the socket's other end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from lora_plugin.adapter.load import load
from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.errors import LoraPluginError, unexpected
from lora_plugin.layout import ModelLayout
from lora_plugin.worker.aside import step_aside


def serve(connection: socket.socket) -> None:
    """Answer jobs until the other end is closed."""
    with connection, connection.makefile("rb") as lines:
        layout = ModelLayout.from_dict(json.loads(next(lines)))
        connection.sendall(b"{}\n")
        for line in lines:
            _answer(connection, json.loads(line), layout)


def _answer(connection: socket.socket, job: dict[str, Any], layout: ModelLayout) -> None:
    try:
        packed = load(Path(job.pop("root")), layout=layout, **job)
    except LoraPluginError as error:
        _send(connection, {"reason": error.reason.to_dict()})
    except Exception as error:
        traceback.print_exc()
        _send(connection, {"reason": unexpected(error).to_dict()})
    else:
        _send_packed(connection, packed)


def _send_packed(connection: socket.socket, packed: PackedAdapter) -> None:
    if packed.relative or not packed.nbytes:
        _send(connection, {})
        return
    reply = {
        "rank": packed.rank,
        "nbytes": packed.nbytes,
        "layers": [(layer.layer, layer.rank, bool(layer.outputs)) for layer in packed.layers],
    }
    descriptor = os.memfd_create("lora-adapter")
    try:
        rest = packed.slab.view(torch.uint8).numpy().data
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        _send(connection, reply, descriptor)
    finally:
        os.close(descriptor)


def _send(connection: socket.socket, reply: dict[str, Any], *descriptors: int) -> None:
    line = json.dumps(reply).encode() + b"\n"
    sent = socket.send_fds(connection, [line], descriptors)
    connection.sendall(line[sent:])


def main() -> None:
    # Ctrl-C is for the server, which ends this process, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, *engine_cores = map(int, sys.argv[1:])
    step_aside(set(engine_cores))
    serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main()
