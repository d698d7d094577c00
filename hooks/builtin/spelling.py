"""How an adapter is spelled: `name`, `name@version`, `a*0.7+b`; the text is a name, never a path."""

from __future__ import annotations

import re
from typing import Final

from lora_plugin.hooks.types import Part, Selection

BASE: Final = "base"
"""Stands for the base model in fields and headers."""
MAX_PARTS: Final = 16

_NAME: Final = r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,99})"
_VERSION: Final = r"@(?P<version>[0-9a-fA-F]{7,64})"
_VERSIONED: Final = re.compile(_NAME + _VERSION)
_PART: Final = re.compile(rf"{_NAME}(?:{_VERSION})?(?:\*(?P<weight>-?[0-9]{{1,6}}(?:\.[0-9]{{1,9}})?))?")


def read_name(text: str) -> Selection:
    """`name` or `name@version`; whatever is neither is a name that nobody has."""
    return read_version(text) or Selection(text)


def read_version(text: str) -> Selection | None:
    """`name@version`, the version as 7 to 64 hexadecimal digits; None for anything else."""
    match = _VERSIONED.fullmatch(text)
    return match and Selection(match["name"], match["version"].lower())


def read_parts(text: str) -> tuple[Part, ...]:
    """The parts of `a+b`, `a*0.7+b@4f2a91c*-0.3` or `a*0.5`, in order; empty for anything else.

    A single name without a weight is no composition; neither is one with a weight of 0.
    """
    matches = [_PART.fullmatch(term) for term in text.split("+", MAX_PARTS)]
    parts = [
        Part(m["name"], m["version"] and m["version"].lower(), float(m["weight"] or 1)) for m in matches if m
    ]
    if len(parts) < len(matches) or len(parts) > MAX_PARTS or not all(part.weight for part in parts):
        return ()
    return tuple(parts) if "+" in text or "*" in text else ()


def spell(part: Part) -> str:
    """A part as `read_parts` reads it."""
    version = f"@{part.version}" if part.version else ""
    weight = "" if part.weight == 1 else f"*{part.weight:.9f}".rstrip("0").rstrip(".")
    return f"{part.adapter}{version}{weight}"
