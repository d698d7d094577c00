"""One block of page-locked host memory for the packed adapters of a worker on a GPU.

From page-locked memory the device fetches by itself, while the steps' thread goes on; to lock it is slow, and
so is done once. What does not fit lies in ordinary memory: its copy is right, too, and slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import queue
import threading
import weakref
from bisect import insort
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from lora_plugin.adapter.pack import PackedAdapter, moved
from lora_plugin.layout import ModelLayout

logger = logging.getLogger("lora_plugin")

ALIGNMENT: Final = 256
"""Bytes: every extent starts and ends at a multiple of it."""
_Extent = tuple[int, int]
"""First byte, and the one behind the last."""


class Event(Protocol):
    """What `torch.cuda.Event` has."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


def _recorded() -> Any:
    """An event behind what is queued so far on this thread's stream; to wait for it takes no core."""
    untyped: Any = torch.cuda
    event = untyped.Event(blocking=True)
    event.record()
    return event


class HostMemory:
    """Extents of a block, one for each adapter: the smallest free one that is large enough.

    An extent is given back by the end of its `PackedAdapter`, which nobody may keep a view of beyond that.
    Used by the stager's thread; `copied` alone by the one that steps, which never waits here.

    Args:
        block: uint8 [nbytes].
        layout: the model whose adapters come here.
        device: the index of the GPU that they are copied to; -1 for the calling thread's.
        recorded: makes an event that is done when all is that the calling thread has queued.
    """

    def __init__(
        self,
        block: Tensor,
        layout: ModelLayout,
        *,
        device: int = -1,
        recorded: Callable[[], Event] = _recorded,
    ) -> None:
        self._block = block
        self._layout = layout
        self._device = device
        self._recorded = recorded
        nbytes = block.numel() // ALIGNMENT * ALIGNMENT
        self._free: list[_Extent] = [(0, nbytes)] if nbytes else []
        # Whoever lets go of an adapter, a garbage collection too, only puts its extent here.
        self._returned: queue.SimpleQueue[_Extent] = queue.SimpleQueue()
        self._copies: dict[PackedAdapter, Event] = {}
        self._lock = threading.Lock()

    @property
    def free(self) -> tuple[_Extent, ...]:
        """The free extents by address, no two of them adjacent."""
        return tuple(self._free)

    def adopt(self, packed: PackedAdapter) -> PackedAdapter:
        """The adapter in an extent of the block; the same one where none is large enough."""
        self.reclaim()
        nbytes = packed.slab.nbytes
        extent = self._take(nbytes)
        if extent is None and nbytes <= self._block.numel() and self._copies:
            # Some may be kept by nothing but their copies.
            self.reclaim(wait=True)
            extent = self._take(nbytes)
        if extent is None:
            logger.debug("%d bytes of an adapter lie in ordinary memory: no free extent is as large", nbytes)
            return packed
        start, _ = extent
        slab = self._block[start : start + nbytes].view(packed.slab.dtype)
        try:
            adopted = moved(packed, slab, self._layout)
        except BaseException:
            self._give_back(extent)
            raise
        weakref.finalize(adopted, self._returned.put, extent).atexit = False
        return adopted

    def copied(self, packed: PackedAdapter) -> None:
        """Its copy to the device has been queued: until that is done the adapter is kept, and so its bytes.

        In ordinary memory, too: the driver may, and on most machines does, take those before it returns.
        """
        event = self._recorded()
        with self._lock:
            self._copies[packed] = event

    def reclaim(self, *, wait: bool = False) -> None:
        """Take back what adapters had that are gone.

        Args:
            wait: for the copies that are under way.
        """
        self._end_copies(wait)
        while not self._returned.empty():
            self._give_back(self._returned.get())

    def _end_copies(self, wait: bool) -> None:
        with self._lock:
            copies = list(self._copies.items())
        untyped: Any = torch.cuda
        # Else CUDA makes a context for this thread on the first GPU: half a gigabyte, not this worker's.
        with untyped.device(self._device):
            for packed, event in copies:
                if wait:
                    event.synchronize()
                if not event.query():
                    continue
                with self._lock:
                    # It may have been copied again since.
                    if self._copies[packed] is event:
                        del self._copies[packed]

    def _take(self, nbytes: int) -> _Extent | None:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        fitting = [(stop - start, start) for start, stop in self._free if stop - start >= size]
        if not size or not fitting:
            return None
        found, start = min(fitting)
        self._free.remove((start, start + found))
        if found > size:
            insort(self._free, (start + size, start + found))
        return start, start + size

    def _give_back(self, extent: _Extent) -> None:
        start, stop = extent
        for free in tuple(self._free):
            if free[1] == start or free[0] == stop:
                self._free.remove(free)
                start, stop = min(start, free[0]), max(stop, free[1])
        insort(self._free, (start, stop))


def page_locked(nbytes: int) -> Tensor:
    """A block of host memory that the GPU reads by itself, for as long as a view of it lives.

    Not of torch's allocator, which rounds up to a power of two.

    Returns:
        uint8 [nbytes, rounded up to `ALIGNMENT`]; [0], with a warning, where so much cannot be locked.
    """
    nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        # Shared: of private pages that are locked, a fork would copy every one.
        memory = (ctypes.c_ubyte * nbytes).from_buffer(mmap.mmap(-1, nbytes))
    except (OSError, OverflowError) as error:
        return _without(nbytes, str(error))
    address = ctypes.addressof(memory)
    untyped: Any = torch.cuda
    runtime = untyped.cudart()
    code = int(runtime.cudaHostRegister(address, nbytes, 0))
    if code:
        # The runtime keeps the error for whoever asks next: the launch of a kernel, which fails in its place.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
        return _without(nbytes, f"CUDA error {code}")
    # Before its pages go; at exit the process's end does it.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _without(nbytes: int, why: str) -> Tensor:
    logger.warning(
        "adapters are copied to the device from ordinary memory, which is slower: %.1f GB of "
        "LORA_PLUGIN_HOST_MEMORY cannot be page-locked (%s); is there so much?",
        nbytes / 1e9,
        why,
    )
    return torch.empty(0, dtype=torch.uint8)
