"""Which implementation computes: asked for by name, or picked for the device."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__name__)


def available(device_type: str = "cpu") -> tuple[str, ...]:
    """The implementations that can be had on `device_type`, the preferred one first."""
    return ("triton", "torch") if device_type == "cuda" and _import_triton() else ("torch",)


def choose(requested: str, device_type: str) -> str:
    """The implementation to use on `device_type` ("cpu", "cuda").

    "auto" falls back to what there is; an explicit choice that cannot be had raises ValueError.
    """
    names = available(device_type)
    if requested == "auto":
        return names[0]
    if requested not in names:
        found = ", ".join(("auto", *names))
        raise ValueError(f"kernels {requested!r} cannot be had on {device_type}; choose one of: {found}")
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
