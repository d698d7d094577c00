"""`compositions.yaml`: names for adapters that are served together as one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError

from lora_plugin.hooks.builtin.spelling import MAX_PARTS, read_parts
from lora_plugin.hooks.types import Part
from lora_plugin.routing.documents import check_mapping, check_new_name, in_words, read_target

FILE: Final = "compositions.yaml"

Parts = tuple[Part, ...]
Factor = Annotated[float, Field(strict=True, ge=-1e6, le=1e6, allow_inf_nan=False)]
_ENTRY: Final[TypeAdapter[str | dict[str, float]]] = TypeAdapter(
    str | Annotated[dict[str, Factor], Field(min_length=1, max_length=MAX_PARTS)]
)


def parse_compositions(document: object, base_models: Collection[str]) -> Mapping[str, Parts]:
    """The compositions of a file by name: `a*0.7+b`, or factors by part.

    Raises:
        ValueError: with the entry and what is wrong with it.
    """
    compositions: dict[str, Parts] = {}
    for name, raw in check_mapping(document).items():
        check_new_name(name, base_models)
        try:
            entry = _ENTRY.validate_python(raw)
            compositions[name] = _from_text(entry) if isinstance(entry, str) else _from_factors(entry)
        except ValidationError as error:
            raise ValueError(f"{name}: {in_words(error)}") from None
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return compositions


def _from_text(text: str) -> Parts:
    parts = read_parts(text)
    if not parts:
        raise ValueError(f"{text[:120]!r} is no composition such as 'a*0.7+b'")
    return parts


def _from_factors(factors: Mapping[str, float]) -> Parts:
    parts = []
    for text, factor in factors.items():
        target = read_target(text)
        if target.adapter is None or not factor:
            raise ValueError(f"{text[:120]!r} with the factor {factor:g} adds nothing")
        parts.append(Part(target.adapter, target.version, float(factor)))
    return tuple(parts)
