"""Adapters served together as one: what it is called, which version it is, and how its parts travel.

A composition is staged, evicted and leased like any adapter. Where that has a folder, it has its parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from lora_plugin.adapter.digest import adapter_id
from lora_plugin.directory.entry import Version
from lora_plugin.readiness.staging import StageSpec

_MARK: Final = "parts:"
"""No absolute path begins so."""


@dataclass(frozen=True, slots=True)
class PartSource:
    """A version that is part of a composition.

    Attributes:
        path: its folder.
        digest: its content.
        weight: the factor of what it adds.
    """

    path: str
    digest: str
    weight: float


def compose(name: str, versions: Sequence[Version], parts: Sequence[PartSource]) -> StageSpec:
    """The version of a composition: a function of its parts' contents and weights.

    Args:
        name: the composition's.
        versions: of the parts.
        parts: the same, with paths and weights.
    """
    content = "".join(f"{part.digest} {part.weight!r}\n" for part in parts)
    digest = hashlib.sha256(f"composition\n{content}".encode()).hexdigest()
    nbytes = sum(version.packed_bytes for version in versions)
    path = _MARK + json.dumps([asdict(part) for part in parts], separators=(",", ":"))
    return StageSpec(adapter_id(name, digest), name, digest, path, nbytes)


def parts_of(path: str) -> tuple[PartSource, ...]:
    """The parts that a `StageSpec.path` names; empty for a folder's."""
    if not path.startswith(_MARK):
        return ()
    return tuple(PartSource(**fields) for fields in json.loads(path.removeprefix(_MARK)))
