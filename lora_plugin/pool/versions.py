"""Every version that the pool knows: who uses it, and whether it may go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from lora_plugin.pool.entry import Entry
from lora_plugin.pool.references import References


class Versions:
    """The entries by id, and what keeps each: references, leases, a place in the running step, a pin.

    Args:
        references: of unfinished requests.
        runs: whether an adapter is in use on the device in this step.
        clock: seconds, never going back.
    """

    def __init__(
        self, references: References, runs: Callable[[Entry], bool], clock: Callable[[], float]
    ) -> None:
        self.references = references
        self.clock = clock
        self._runs = runs
        self._entries: dict[int, Entry] = {}
        self._retired: dict[int, Entry] = {}
        self._uses = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, adapter_id: int) -> Entry | None:
        return self._entries.get(adapter_id)

    def add(self, entry: Entry) -> None:
        self._entries[entry.adapter_id] = entry

    def delete(self, entry: Entry) -> None:
        del self._entries[entry.adapter_id]
        self._retired.pop(entry.adapter_id, None)

    def touch(self, entry: Entry) -> None:
        """It is used now."""
        self._uses += 1
        entry.last_used, entry.used_at = self._uses, self.clock()

    def retire(self, entry: Entry) -> None:
        """It is served no longer."""
        entry.retired = True
        self._retired[entry.adapter_id] = entry

    def revive(self, entry: Entry) -> None:
        """It is served again."""
        entry.retired, entry.abort_at = False, math.inf
        self._retired.pop(entry.adapter_id, None)

    def in_use(self, entry: Entry) -> bool:
        """Whether a request or a response uses it."""
        now = self.clock()
        leased = any(until > now for until in entry.leases.values())
        return leased or self.references.count(entry.adapter_id) > 0 or self._runs(entry)

    def busy(self, entry: Entry) -> bool:
        """Whether it is in use, or will be in a moment."""
        return entry.hold_until > self.clock() or self.in_use(entry)

    def evictable(self, entry: Entry) -> bool:
        """Whether it may leave host memory for another."""
        return not entry.pinned and not self.busy(entry)

    def done(self) -> list[Entry]:
        """Retired versions that nothing uses any more."""
        return [entry for entry in self._retired.values() if not self.busy(entry)]

    def overstayed(self) -> dict[str, str]:
        """Requests of retired versions whose time is over: request id -> adapter."""
        now = self.clock()
        return {
            request_id: entry.name
            for entry in self._retired.values()
            if entry.abort_at <= now
            for request_id in self.references.requests(entry.adapter_id)
        }
