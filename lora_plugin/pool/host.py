"""The host cache's bytes: who holds how many, and who goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from lora_plugin.pool.entry import Entry, Host


class HostCache:
    """Bookkeeping of the workers' host copies, staging ones included, in order of use.

    Args:
        budget: bytes that all copies together may take.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._copies: OrderedDict[int, Entry] = OrderedDict()

    def add(self, entry: Entry) -> None:
        self._copies[entry.adapter_id] = entry
        self.used += entry.nbytes

    def remove(self, entry: Entry) -> None:
        del self._copies[entry.adapter_id]
        self.used -= entry.nbytes

    def touch(self, entry: Entry) -> None:
        """The entry, if it has a copy, becomes the most recently used."""
        if entry.adapter_id in self._copies:
            self._copies.move_to_end(entry.adapter_id)

    def victims(self, nbytes: int, evictable: Callable[[Entry], bool]) -> list[Entry] | None:
        """The least recently used copies whose leaving makes room for `nbytes`; None if nothing does.

        A copy still being staged is no victim: two adapters would throw each other out for ever.
        """
        missing = self.used + nbytes - self.budget
        chosen: list[Entry] = []
        for entry in self._copies.values():
            if missing <= 0:
                break
            if entry.host is Host.READY and evictable(entry):
                chosen.append(entry)
                missing -= entry.nbytes
        return chosen if missing <= 0 else None
