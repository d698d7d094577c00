"""Memory without a path: a descriptor that one process hands to another, and tensors over it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

_CLOSE_ON_EXEC = 1
_FAILED = ctypes.c_void_p(-1).value

# Pythons that were built for an old libc, as uv's were, have no os.memfd_create. Python's own mmap keeps a
# descriptor for as long as it lives: one per adapter.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def create() -> int:
    """A descriptor, to be closed, of memory without a byte yet.

    Raises:
        OSError: the system has no such memory, or no descriptor left.
    """
    descriptor: int = _libc.memfd_create(b"lora-adapter", _CLOSE_ON_EXEC)
    if descriptor < 0:
        raise _error()
    return descriptor


def over(descriptor: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The first `size` elements as a tensor [size]; who shares the memory sees what is written.

    It outlives the descriptor. The last reference gives the memory back without the interpreter's lock: page
    by page, for 20 MB that takes 5 ms.

    Raises:
        OSError: it cannot be mapped.
    """
    if not size:
        return torch.zeros(0, dtype=dtype)
    nbytes = size * dtype.itemsize
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        raise _error()
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit, when tensors may be left.
    weakref.finalize(block, _libc.munmap, address, nbytes).atexit = False
    return torch.frombuffer(block, dtype=dtype)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
