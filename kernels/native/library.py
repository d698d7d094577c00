"""The compiled kernel in this process, and the structures it reads."""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch

from lora_plugin.kernels.native.build import Unavailable, build

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The kernel's number of each dtype it may know; bit number in its answer, too."""


class StepTable(ctypes.Structure):
    """A step; see `NativeStep`."""

    _fields_ = (
        ("chunks", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("max_rank", ctypes.c_int32),
        ("total_rows", ctypes.c_int32),
    )


class LayerTable(ctypes.Structure):
    """A layer; see `NativeLayer`."""

    _fields_ = (
        ("step", ctypes.c_void_p),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        ("slices", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


def load() -> ctypes.PyDLL:
    """The library, compiled if need be.

    Raises:
        Unavailable: it cannot be had, and why.
    """
    found = _load()
    if isinstance(found, Unavailable):
        raise found
    return found


def why_not(dtype: torch.dtype) -> str | None:
    """Why the kernel cannot compute in `dtype`; None when it can."""
    if dtype not in DTYPES:
        return f"it does not compute in {dtype}"
    try:
        known = load().lora_cpu_dtypes()
    except Unavailable as error:
        return str(error)
    return None if known >> DTYPES[dtype] & 1 else f"this CPU has no AVX-512 instructions for {dtype}"


@cache
def usable(dtype: torch.dtype) -> bool:
    """Whether the kernel computes in `dtype`; says why not, once."""
    reason = why_not(dtype)
    if reason is not None:
        logger.warning("no native CPU kernel: %s; torch computes instead, which is slower", reason)
    return reason is None


@cache
def _load() -> ctypes.PyDLL | Unavailable:
    try:
        # Keeps the GIL: a call takes microseconds, and taking the GIL back from a busy thread milliseconds.
        library = ctypes.PyDLL(str(build()))
    except Unavailable as error:
        return error
    except OSError as error:
        return Unavailable(f"the compiled kernel cannot be loaded: {error}")
    pointer, stride = ctypes.c_void_p, ctypes.c_int64
    library.lora_cpu_apply.argtypes = (pointer, pointer, pointer, stride, stride)
    library.lora_cpu_apply.restype = None
    return library
