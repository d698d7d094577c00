"""Which implementation computes: asked for by name, or picked for the device."""

from __future__ import annotations

import logging
from functools import cache

import torch

from lora_plugin.kernels.native import library as native

logger = logging.getLogger(__name__)


def available(device_type: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    """The implementations that can be had on `device_type` for `dtype`, the preferred one first."""
    if device_type == "cuda" and _import_triton():
        return ("triton", "torch")
    if device_type == "cpu" and native.usable(dtype):
        return ("native", "torch")
    return ("torch",)


def choose(requested: str, device_type: str, dtype: torch.dtype = torch.float32) -> str:
    """The implementation to use on `device_type` ("cpu", "cuda") for layers of `dtype`.

    "auto" falls back to what there is; an explicit choice that cannot be had raises ValueError.
    """
    if requested == "torch":
        return requested
    names = available(device_type, dtype)
    if requested == "auto":
        return names[0]
    if requested not in names:
        found = ", ".join(("auto", *names))
        reason = native.why_not(dtype) if (requested, device_type) == ("native", "cpu") else None
        because = f" ({reason})" if reason else ""
        raise ValueError(
            f"kernels {requested!r} cannot be had on {device_type}{because}; choose one of: {found}"
        )
    return requested


@cache
def _import_triton() -> bool:
    """Says so, once, when a GPU has to do without."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        logger.warning("no Triton (%s): the kernels fall back to torch", error)
        return False
    return True
