"""JSON documents that strangers wrote: parsed with every failure turned into a reason."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from typing import Any, Final

from lora_plugin.errors import AdapterIncomplete, AdapterRejected, Code

MAX_VALUES: Final = 1 << 20
"""A parsed value takes up to some 200 bytes. 72,000 tensors, the most that any adapter has, are 580,000."""

_KEY_COSTS: Final = 3
"""Of those, 290,000 are keys."""

_SHOWN: Final = 5
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = 160
_SHORT.maxlong = 40
_SHORT.maxother = 80


def show(value: object) -> str:
    """A short printable form of any parsed value, safe for logs and JSON."""
    return _SHORT.repr(value)


def show_some(values: Sequence[object]) -> str:
    """The first few of many values."""
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(show(value) for value in values[:_SHOWN]) + more


def parse_object(raw: bytes, what: str, code: Code, *, growing: bool = False) -> dict[str, Any]:
    """The JSON object in `raw`.

    Args:
        raw: UTF-8, with or without a byte order mark.
        what: how messages call the document.
        code: the code of a refusal.
        growing: whether a document that ends too early may still be being written.

    Raises:
        AdapterRejected: with `code`, for anything that is not one JSON object without repeated keys;
            TOO_LARGE, unparsed, for more than `MAX_VALUES` values.
        AdapterIncomplete: INCOMPLETE, for a document cut off at its end, if `growing`.
    """
    values = sum(raw.count(opening) for opening in (b",", b"[", b"{"))
    # A key costs more than a value, and one large object is parsed without a pause for other threads.
    values = max(values, _KEY_COSTS * raw.count(b":"))
    if values > MAX_VALUES:
        raise AdapterRejected(
            Code.TOO_LARGE,
            f"{what} is too large",
            expected=f"at most {MAX_VALUES} values",
            found=f"about {values} values",
        )
    try:
        data = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        if growing and _is_cut_off(raw, error):
            raise AdapterIncomplete(Code.INCOMPLETE, f"{what} ends in the middle of its JSON") from None
        raise AdapterRejected(code, f"{what} is not valid JSON", found=_describe(error)) from None
    if not isinstance(data, dict):
        raise AdapterRejected(code, f"{what} is not a JSON object", expected="{...}", found=show(data))
    return data


class _RepeatedKey(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise _RepeatedKey
    return data


def _is_cut_off(raw: bytes, error: Exception) -> bool:
    text = raw.rstrip(b" \t\r\n")
    return not text.endswith(b"}") or (
        isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
    )


def _describe(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return f"a fault at line {error.lineno}, column {error.colno}"
        case UnicodeDecodeError():
            return f"bytes that are not UTF-8, at offset {error.start}"
        case _RepeatedKey():
            return "a key given twice"
        case RecursionError():
            return "nesting that is too deep"
        case _:
            return "a number that is too long"
