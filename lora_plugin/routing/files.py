"""The routing files of the watched directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lora_plugin.routing import aliases, compositions
from lora_plugin.routing.aliases import Alias
from lora_plugin.routing.compositions import Parts
from lora_plugin.routing.kept_file import KeptFile


class RoutingFiles:
    """`aliases.yaml` and `compositions.yaml`, each with its last good content.

    Args:
        root: the watched directory.
        base_models: names that the base model is served under.
        settle_seconds: quiet time before a changed file is read.
        reachable: whether the directory is there, by what is known of its adapters.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        root: Path,
        base_models: Collection[str],
        *,
        settle_seconds: float,
        reachable: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reachable = reachable
        self.aliases: KeptFile[Mapping[str, Alias]] = KeptFile(
            root / aliases.FILE,
            partial(aliases.parse_aliases, base_models=base_models),
            {},
            settle_seconds=settle_seconds,
            clock=clock,
        )
        self.compositions: KeptFile[Mapping[str, Parts]] = KeptFile(
            root / compositions.FILE,
            partial(compositions.parse_compositions, base_models=base_models),
            {},
            settle_seconds=settle_seconds,
            clock=clock,
        )

    @property
    def all(self) -> tuple[KeptFile[Any], ...]:
        return (self.aliases, self.compositions)

    @property
    def names(self) -> set[str]:
        """Every alias and every named composition."""
        return {*self.aliases.value, *self.compositions.value}

    def look(self, *, at_once: bool = False) -> float | None:
        """See `KeptFile.look`. A directory that is away, or unmounted, takes no file with it."""
        if not self._reachable():
            return None
        waits = [file.look(at_once=at_once) for file in self.all]
        return min((wait for wait in waits if wait is not None), default=None)
