"""An older version of an adapter that the engines still hold for requests that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lora_plugin.readiness.staging import StageSpec


def find_held(
    engines: Sequence[Sequence[dict[str, Any]]], name: str, prefix: str, path: str
) -> StageSpec | None:
    """The version that every engine has ready; None where there is none.

    Args:
        engines: every engine's versions of the adapter, as its pool shows them.
        name: the adapter.
        prefix: how the version begins.
        path: the adapter's folder.
    """
    ready = [
        {
            int(copy["id"]): StageSpec(int(copy["id"]), name, copy["digest"], path, copy["nbytes"])
            for copy in versions
            if copy["host"] == "ready" and copy["digest"].startswith(prefix)
        }
        for versions in engines
    ]
    everywhere = set.intersection(*map(set, ready)) if ready else set()
    return ready[0][min(everywhere)] if everywhere else None
