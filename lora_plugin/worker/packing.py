"""A process of its own that reads, checks and packs: half of a load is Python, which would hold up the steps.

Threads of one process take turns at Python: packed in a thread of the worker, an adapter of 20 MB took some
40 ms from the running steps, and more where that thread had to wait for a core. The process also keeps
whatever a file may provoke away from the engine.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch

from lora_plugin.adapter.base_model import BaseModel
from lora_plugin.adapter.load import load
from lora_plugin.adapter.pack import SERVED, PackedAdapter, views
from lora_plugin.aside import cores
from lora_plugin.errors import Code, LoraPluginError, Reason
from lora_plugin.layout import ModelLayout
from lora_plugin.worker import shared_memory

logger = logging.getLogger("lora_plugin")

_MODULE = "lora_plugin.worker.packing_process"
_REPLY_BYTES = 1 << 16
_ATTEMPTS = 2
"""It may have been another that ended it."""

Reply = tuple[dict[str, Any], int | None]
"""The answer to a job, and the descriptor of the memory that holds the adapter."""


class PackingProcess:
    """The process: started at once, and again when it is gone.

    Made by the thread of the steps, used by one other.

    Args:
        layout: the model's layers with this rank's shards.
    """

    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout
        self._child: _Child | None = None
        self._usable = True
        self._came_up = False
        # Taken now: the thread that uses it, and starts another, is not on the engine's cores.
        self._engine_cores = cores()
        self._start()

    def load(
        self,
        root: Path,
        name: str,
        layout: ModelLayout,
        expected_digest: str | None,
        max_bytes: int,
        *,
        base: BaseModel | None = None,
        trusted: bool = False,
        factor: float = 1.0,
    ) -> PackedAdapter:
        """`adapter.load.load` in the process; in this thread if the base model's weights are needed for it,
        or where no process can be had.

        Raises:
            LoraPluginError: what the process refused it with; INTERNAL when it ends each time.
        """
        job = {
            # The process stays in the folder that it was started in.
            "root": str(root.absolute()),
            "name": name,
            "expected_digest": expected_digest,
            "max_bytes": max_bytes,
            "trusted": trusted,
            "factor": factor,
        }
        reply, memory = self._ask(job)
        if "reason" in reply:
            raise LoraPluginError.of(Reason.from_dict(reply["reason"]))
        if memory is None:
            return load(
                root, name, layout, expected_digest, max_bytes, base=base, trusted=trusted, factor=factor
            )
        slab = _mapped(memory, reply["nbytes"], layout)
        return PackedAdapter(reply["rank"], reply["nbytes"], views(reply["layers"], layout, slab), slab)

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.end()

    def _start(self) -> None:
        try:
            self._child = _Child(self._engine_cores)
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        logger.warning("adapters are packed beside the steps: no process can be started for it (%s)", why)
        self._usable = False

    def _ask(self, job: dict[str, Any]) -> Reply:
        ended = 0
        for _ in range(_ATTEMPTS):
            child = self._running()
            if child is None:
                return {}, None
            try:
                child.greet(self._layout)
                self._came_up = True
                return child.ask(job)
            except OSError:
                ended = child.end()
            if not self._came_up:
                # Nor would another.
                self._give_up(f"exit code {ended}")
        raise LoraPluginError(
            Code.INTERNAL,
            "the process that packs adapters ended",
            found=f"exit code {ended}, after {_ATTEMPTS} attempts",
            hint="is there enough memory? It is started anew for the next adapter",
        )

    def _running(self) -> _Child | None:
        """A process that was started, or None where none can be had."""
        if self._usable and self._child is not None and self._child.is_gone:
            logger.warning("the process that packs adapters is gone, and started anew")
            # Of one that only was not waited for, too: it may pack for long, or be stopped.
            self._child.end()
            self._start()
        return self._child if self._usable else None


class _Child:
    """One process, and the socket to it, whose end it does not outlive."""

    def __init__(self, engine_cores: Set[int]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: nothing is imported from the folder that the server was started in.
                (sys.executable, "-P", "-m", _MODULE, str(theirs.fileno()), *map(str, engine_cores)),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._greeted = False

    @property
    def is_gone(self) -> bool:
        return self._socket.fileno() < 0 or self._process.poll() is not None

    def greet(self, layout: ModelLayout) -> None:
        """Tell it the layout, once, and wait until it is up. Raises OSError when it ends instead."""
        if not self._greeted:
            self.ask(layout.to_dict())
            self._greeted = True

    def ask(self, job: dict[str, Any]) -> Reply:
        """Raises OSError when it ends instead of answering."""
        try:
            self._socket.sendall(json.dumps(job).encode() + b"\n")
            return self._reply()
        except BaseException:
            # An answer left unread would be taken for the next job's.
            self._socket.close()
            raise

    def end(self) -> int:
        """Its exit code."""
        self._socket.close()
        self._process.kill()
        return self._process.wait()

    def _reply(self) -> Reply:
        line, descriptors = b"", []
        try:
            while not line.endswith(b"\n"):
                part, received, _, _ = socket.recv_fds(self._socket, _REPLY_BYTES, 1)
                descriptors += received
                if not part:
                    raise ConnectionResetError
                line += part
            return json.loads(line), descriptors.pop() if descriptors else None
        finally:
            # Left when the answer broke off.
            for descriptor in descriptors:
                os.close(descriptor)


def _mapped(descriptor: int, nbytes: int, layout: ModelLayout) -> torch.Tensor:
    """The slab in the memory of a descriptor, which is closed."""
    dtype = SERVED[layout.dtype]
    try:
        slab = shared_memory.over(descriptor, nbytes // dtype.itemsize, dtype)
    finally:
        os.close(descriptor)
    # Looked at once, so that the copy in a step does not wait for page faults.
    slab.view(torch.uint8)[:: mmap.PAGESIZE].sum()
    return slab
