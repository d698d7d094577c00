"""The built-in ways to name an adapter, each a plugin of its own that can be blocked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from lora_plugin.hooks.builtin.spelling import BASE, read_name, read_parts, read_version, spell
from lora_plugin.hooks.specs import hookimpl
from lora_plugin.hooks.types import Request, Selection


class Way:
    """A plugin with nothing but `select_adapter`.

    Args:
        read: what a request says in this way; None where it says nothing.
    """

    def __init__(self, read: Callable[[Request], Selection | None]) -> None:
        self._read = read

    @hookimpl
    def select_adapter(self, request: Request) -> Selection | None:
        return self._read(request)


def by_name(request: Request) -> Selection | None:
    """`model` as an adapter's name: whatever no other spelling of `model` takes."""
    if not _names_adapter(request):
        return None
    others = (by_prefix, by_version, by_composition)
    return None if any(read(request) for read in others) else Selection(request.model)


def by_prefix(request: Request) -> Selection | None:
    """`model` as `base:adapter` or `base:adapter@version`, with a name of the base model."""
    if not _names_adapter(request):
        return None
    names = [base for base in request.base_models if request.model.startswith(f"{base}:")]
    longest = max(names, key=len, default=None)
    return None if longest is None else read_name(request.model[len(longest) + 1 :])


def by_version(request: Request) -> Selection | None:
    """`model` as `name@version`."""
    return read_version(request.model) if _names_adapter(request) else None


def by_composition(request: Request) -> Selection | None:
    """`model` as `a+b` or `a*0.7+b*0.3`."""
    parts = read_parts(request.model) if _names_adapter(request) else ()
    parts = tuple(sorted(parts, key=lambda part: (part.adapter, part.version or "", part.weight)))
    return Selection("+".join(map(spell, parts)), parts=parts) if parts else None


def by_field(name: str) -> Callable[[Request], Selection | None]:
    """A field of the body: a name to look up, `name@version`, or `base`."""
    return lambda request: _read_value(request.fields.get(name))


def by_header(request: Request) -> Selection | None:
    """The header `X-LoRA-Adapter`: as a field of the body."""
    return _read_value(request.headers.get("x-lora-adapter"))


WAYS: Final[Mapping[str, Way]] = {
    "model-name": Way(by_name),
    "model-prefix": Way(by_prefix),
    "model-version": Way(by_version),
    "model-composition": Way(by_composition),
    "field-lora-path": Way(by_field("lora_path")),
    "field-adapter-id": Way(by_field("adapter_id")),
    "header": Way(by_header),
}
"""By the name that the block list calls them."""


def _names_adapter(request: Request) -> bool:
    return bool(request.model) and request.model not in request.base_models


def _read_value(value: Any) -> Selection | None:
    if value is None or value == "":
        return None
    if value == BASE:
        return Selection(None)
    # What is not a text is not ignored either: it becomes a name that nobody has.
    return read_name(value) if isinstance(value, str) else Selection(json.dumps(value, default=str)[:100])
