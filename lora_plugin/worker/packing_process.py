"""What runs in the process that packs, with a descriptor and the engine's cores as its arguments.

The socket of that descriptor brings a line with the model's layout, then a line for each job; each is
answered with a line, to which the descriptor of the packed adapter's memory is attached. The process ends
with the socket's other end, without a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lora_plugin.adapter.load import load
from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.aside import step_aside
from lora_plugin.errors import LoraPluginError, unexpected
from lora_plugin.layout import ModelLayout
from lora_plugin.worker import shared_memory

_FIRST_TO_GO = "1000"


def serve(connection: socket.socket) -> None:
    """Answer jobs until the other end is closed."""
    with connection, connection.makefile("rb") as lines:
        first = next(lines, b"")
        if not first:
            return
        layout = ModelLayout.from_dict(json.loads(first))
        # Where no such memory can be had, it shows before the first job.
        os.close(shared_memory.create())
        connection.sendall(b"{}\n")
        for line in lines:
            _answer(connection, json.loads(line), layout)


def _answer(connection: socket.socket, job: dict[str, Any], layout: ModelLayout) -> None:
    memory = shared_memory.create()
    try:
        # Packed into what is handed over: memory has it once.
        packed = load(Path(job.pop("root")), layout=layout, zeros=partial(_zeros, memory), **job)
    except LoraPluginError as error:
        _send(connection, {"reason": error.reason.to_dict()})
    except Exception as error:
        traceback.print_exc()
        _send(connection, {"reason": unexpected(error).to_dict()})
    else:
        _send_packed(connection, packed, memory)
    finally:
        os.close(memory)


def _send_packed(connection: socket.socket, packed: PackedAdapter, memory: int) -> None:
    if packed.relative or not packed.nbytes:
        _send(connection, {})
        return
    reply = {
        "rank": packed.rank,
        "nbytes": packed.nbytes,
        "layers": packed.parts,
    }
    _send(connection, reply, memory)


def _zeros(memory: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    os.ftruncate(memory, size * dtype.itemsize)
    return shared_memory.over(memory, size, dtype)


def _send(connection: socket.socket, reply: dict[str, Any], *descriptors: int) -> None:
    line = json.dumps(reply).encode() + b"\n"
    sent = socket.send_fds(connection, [line], descriptors)
    connection.sendall(line[sent:])


def main() -> None:
    # Ctrl-C is for the server, which ends this process, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, *engine_cores = map(int, sys.argv[1:])
    step_aside(set(engine_cores))
    # When memory runs out, this process and not the engine, which is the larger.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    with contextlib.suppress(ConnectionError):
        serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main()
