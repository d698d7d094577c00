"""PEFT's `rank_pattern` and `alpha_pattern`: regular expressions from an adapter's config, made safe to run.

Python's `re` backtracks and cannot be interrupted, so a pattern that could take very long is refused before
it is run: the number of ways in which it can match (`_ways`) bounds the steps of a match.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from lora_plugin.adapter.document import show
from lora_plugin.errors import AdapterRejected, Code

T = TypeVar("T")

MAX_KEY_LENGTH: Final = 512
MAX_MODULE_LENGTH: Final = 160
_MAX_WAYS: Final = 1 << 22
_MAX_TOTAL_WAYS: Final = 1 << 23
_LOOP: Final = 32
"""What an unbounded repeat counts as: n of them match a name of 60 characters in less than 32**n ways."""

_parser: Final[Any] = importlib.import_module("re._parser")


@dataclass(frozen=True, slots=True)
class Patterns(Generic[T]):
    """Values by module name; the first pattern that matches decides, in the order of the config."""

    entries: tuple[tuple[re.Pattern[str], T], ...]

    @classmethod
    def compile(cls, field: str, values: Mapping[str, T]) -> Patterns[T]:
        """Compile the keys as PEFT does (`peft.utils.other.get_pattern_key`).

        Raises:
            AdapterRejected: CONFIG_INVALID, for a key that is not a regular expression or could run too long.
        """
        total = 0
        entries = []
        for key, value in values.items():
            pattern, ways = _compile(field, key)
            total += ways
            if total > _MAX_TOTAL_WAYS:
                raise _refusal(field, key, "patterns that together could take too long to match")
            entries.append((pattern, value))
        return cls(tuple(entries))

    def get(self, module: str, default: T) -> T:
        """The value for a module's name as PEFT knows it, "model.layers.0.self_attn.q_proj".

        Raises:
            AdapterRejected: TENSOR_UNKNOWN, for a name longer than the bound on the time of a match allows.
        """
        if self.entries and len(module) > MAX_MODULE_LENGTH:
            raise AdapterRejected(
                Code.TENSOR_UNKNOWN, f"the module's name is too long to match patterns: {show(module)}"
            )
        return next((value for pattern, value in self.entries if pattern.match(module)), default)


def _compile(field: str, key: str) -> tuple[re.Pattern[str], int]:
    if len(key) > MAX_KEY_LENGTH:
        raise _refusal(field, key, f"a key of {len(key)} characters, of at most {MAX_KEY_LENGTH}")
    source = rf"(.*\.)?({key})$"
    try:
        ways = _ways(_parser.parse(source))
        pattern = re.compile(source)
    except (re.error, OverflowError, RecursionError, ValueError):
        raise _refusal(field, key, "a key that is not a regular expression") from None
    if ways > _MAX_WAYS:
        raise _refusal(field, key, "a regular expression that could take too long to match")
    return pattern, ways


def _refusal(field: str, key: str, found: str) -> AdapterRejected:
    return AdapterRejected(Code.CONFIG_INVALID, f"{field} cannot be used: {show(key)}", found=found)


def _ways(items: Iterable[tuple[Any, Any]]) -> int:
    """An upper bound for the number of ways in which a parsed pattern can match one name."""
    ways = 1
    for operator, argument in items:
        ways = min(ways * _choices(str(operator), argument), _MAX_TOTAL_WAYS + 1)
    return ways


def _choices(operator: str, argument: Any) -> int:
    match operator:
        case "BRANCH":
            return sum(_ways(branch) for branch in argument[1])
        case "SUBPATTERN" | "ASSERT" | "ASSERT_NOT":
            return _ways(argument[-1])
        case "ATOMIC_GROUP":
            return _ways(argument)
        case "GROUPREF_EXISTS":
            return _ways(argument[1]) + _ways(argument[2] or ())
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            low, high, item = int(argument[0]), min(int(argument[1]), _LOOP), _ways(argument[2])
            return max(high - low, 0) + 1 if item == 1 else 1 + item ** max(high, 1)
        case _:
            return 1
