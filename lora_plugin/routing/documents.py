"""What the two routing files have in common: how their entries are checked, and how errors are worded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lora_plugin.adapter.names import RESERVED, is_adapter_name
from lora_plugin.hooks.builtin.spelling import BASE, read_version
from lora_plugin.hooks.types import Selection


class Entry(BaseModel):
    """Base of the entries: immutable, no unknown fields, nothing converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def check_mapping(document: object) -> dict[str, Any]:
    """The top level of a file; an empty file has no entries. Raises ValueError."""
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ValueError(f"expected a mapping of names, found {type(document).__name__}")
    for name in document:
        if not isinstance(name, str):
            raise ValueError(f"the name {name!r} is not a text; put it in quotes")
    return document


def check_new_name(name: str, taken: Collection[str]) -> None:
    """Raises ValueError where an alias or a composition cannot be called so."""
    if not is_adapter_name(name):
        raise ValueError(f"{name[:120]!r} is not a name that an adapter could have")
    if name in RESERVED or name == BASE or name in taken:
        raise ValueError(f"the name {name!r} is taken by the server")


def read_target(text: str) -> Selection:
    """`base`, `name` or `name@version`. Raises ValueError for anything else."""
    if text == BASE:
        return Selection(None)
    target = read_version(text) or Selection(text)
    if target.adapter is None or not is_adapter_name(target.adapter):
        raise ValueError(f"{text[:120]!r} is neither an adapter's name, name@version nor {BASE!r}")
    return target


def in_words(error: ValidationError) -> str:
    """The most particular complaint, in one line."""
    errors = error.errors(include_url=False, include_input=False)
    first = max(errors, key=lambda each: len(each["loc"]))
    # Of a union, pydantic names the branches too: `str`, `dict[str,float]`.
    place = ".".join(str(part) for part in first["loc"] if part != "str" and "[" not in str(part))
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
