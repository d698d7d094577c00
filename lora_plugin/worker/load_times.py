"""How long the stages of a load take in a worker."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch

from lora_plugin.distribution import Distribution

_MAX_PENDING = 64


class Stage(StrEnum):
    """The stages; a metric's label."""

    QUEUE = "queue"
    """waiting for the thread that reads"""
    PACK = "pack"
    """reading, checking, casting and packing, in host memory"""
    DEVICE = "device"
    """copying to the device"""


class LoadTimes:
    """Seconds by stage. On a GPU a copy is timed by events of its stream, and counted once it is done.

    `DEVICE` belongs to the thread that steps, the others to the stager's: each distribution has one writer.

    Args:
        device: where adapters are copied to.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = {stage: Distribution() for stage in Stage}
        self._pending: deque[tuple[Any, Any]] = deque(maxlen=_MAX_PENDING)

    def add(self, stage: Stage, seconds: float) -> None:
        self._seconds[stage].add(seconds)

    @contextmanager
    def copy(self) -> Iterator[None]:
        """Around the copy of one adapter to the device."""
        if self._on_gpu:
            before, after = _event(), _event()
            before.record()
            yield
            after.record()
            self._pending.append((before, after))
            return
        started = time.perf_counter()
        yield
        self.add(Stage.DEVICE, time.perf_counter() - started)

    def to_dict(self) -> dict[str, Any]:
        """A distribution for each stage."""
        while self._pending and self._pending[0][1].query():
            before, after = self._pending.popleft()
            self.add(Stage.DEVICE, before.elapsed_time(after) / 1e3)
        return {str(stage): seconds.to_dict() for stage, seconds in self._seconds.items()}


def _event() -> Any:
    untyped: Any = torch.cuda
    return untyped.Event(enable_timing=True)
