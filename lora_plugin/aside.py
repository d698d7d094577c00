"""Threads and processes that work beside the engine's, for it and never instead of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Set

import torch

# Taken at import: CPU workers replace the public function by one that does nothing.
_set_num_threads = torch.set_num_threads
_NICENESS = 10


def cores() -> Set[int]:
    """Those that the calling thread may run on; empty where that cannot be known."""
    with contextlib.suppress(OSError, AttributeError):
        return os.sched_getaffinity(threading.get_native_id())
    return frozenset()


def step_aside(engine: Set[int]) -> None:
    """Take the calling thread off the engine's cores, if there are others, at a low priority."""
    thread_id = threading.get_native_id()
    with contextlib.suppress(OSError, AttributeError):
        everywhere = set(range(os.cpu_count() or 1))
        os.sched_setaffinity(thread_id, everywhere - engine or everywhere)
    lower_priority()
    _set_num_threads(1)


def lower_priority() -> None:
    """Have the calling thread give way to the engine's and the event loop's wherever they share a core."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
