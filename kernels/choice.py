"""Which implementation computes: asked for by name, or picked for the device."""

from __future__ import annotations


def available() -> tuple[str, ...]:
    """The implementations that can be had here, the preferred one first."""
    return ("torch",)


def choose(requested: str, device_type: str) -> str:
    """The implementation to use on `device_type` ("cpu", "cuda").

    "auto" falls back to what there is; an explicit choice that cannot be had raises ValueError.
    """
    names = available()
    if requested == "auto":
        return names[0]
    if requested not in names:
        found = ", ".join(("auto", *names))
        raise ValueError(f"kernels {requested!r} cannot be had on {device_type}; choose one of: {found}")
    return requested
