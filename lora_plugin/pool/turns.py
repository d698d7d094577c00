"""Rows set aside for adapters that have waited too long, so that nobody new gets in their way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from lora_plugin.pool.entry import Entry
from lora_plugin.pool.extents import Extent


class Turns:
    """Which rows are set aside for whom; no two overlap. What runs there now goes on until it is done."""

    def __init__(self) -> None:
        self._rows: dict[int, Extent] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def renew(self, overdue: Iterable[Entry], choose: Callable[[Entry], Extent | None]) -> None:
        """Set rows aside for these, in this order, as far as there are any; those of others are free again.

        Args:
            overdue: whose turn it is.
            choose: finds rows for one that has none yet; none for an adapter that is not on the device are
                none for a larger one that is not.
        """
        entries = list(overdue)
        kept = {entry.adapter_id for entry in entries}
        self._rows = {key: rows for key, rows in self._rows.items() if key in kept}
        # Hundreds may be overdue in every step: a search over all slabs that failed is not repeated.
        no_room = math.inf
        for entry in entries:
            absent = entry.extent is None
            if entry.adapter_id in self._rows or (absent and entry.rows >= no_room):
                continue
            if (rows := choose(entry)) is not None:
                self._rows[entry.adapter_id] = rows
            elif absent:
                no_room = entry.rows

    def rows(self, entry: Entry) -> Extent | None:
        """What is set aside for an adapter."""
        return self._rows.get(entry.adapter_id)

    def bars(self, entry: Entry, extent: Extent) -> bool:
        """Whether these rows, or some of them, are set aside for another adapter."""
        return any(key != entry.adapter_id and extent.overlaps(rows) for key, rows in self._rows.items())

    def placed(self, entry: Entry, extent: Extent) -> None:
        """The adapter lies there now: its turn is about these rows, and nobody else's is."""
        others = {k: rows for k, rows in self._rows.items() if not extent.overlaps(rows)}
        if entry.adapter_id in self._rows:
            others[entry.adapter_id] = extent
        self._rows = others
