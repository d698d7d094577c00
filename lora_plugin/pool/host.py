"""The host cache's bytes: who holds how many, and who goes first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lora_plugin.pool.entry import Entry
from lora_plugin.pool.policies import Policy


class HostCache:
    """Bookkeeping of the workers' host copies, and of those being made.

    A copy takes its room once it is known to be good: till then it lies beside the others, in what is free
    or, one at a time, beyond the budget. So a bad adapter costs no good one its copy.

    Args:
        budget: bytes that all copies together may take.
        policy: what a copy is worth.
    """

    def __init__(self, budget: int, policy: Policy) -> None:
        self.budget = budget
        self.used = 0
        self.staging = 0
        self._policy = policy
        self._copies: dict[int, Entry] = {}
        # A use adds an item; those that are not the copy's latest are passed over, and cleared in time.
        self._queue: list[tuple[float, int, Entry]] = []
        self._latest: dict[int, int] = {}
        self._items = 0
        self._in_moment = False
        self._no_room = math.inf  # bytes from which on a search of this moment found nothing

    @property
    def free(self) -> int:
        """Bytes that nobody has to leave for; negative while a copy is made beyond the budget."""
        return self.budget - self.used - self.staging

    def may_stage(self, nbytes: int, evictable: Callable[[Entry], bool]) -> bool:
        """Whether a copy can be begun: in what is free, or alone, with others that can go in the end."""
        if nbytes <= self.free:
            return True
        if self.staging or nbytes >= self._no_room:
            return False
        if self.victims(nbytes, evictable) is not None:
            return True
        if self._in_moment:
            self._no_room = nbytes
        return False

    @contextmanager
    def moment(self) -> Iterator[None]:
        """No use ends inside: a search for room that failed there, over all copies, is not repeated."""
        self._in_moment = True
        try:
            yield
        finally:
            self._in_moment, self._no_room = False, math.inf

    def stage(self, entry: Entry) -> None:
        """A copy is being made."""
        self.staging += entry.nbytes

    def unstage(self, entry: Entry) -> None:
        """It is made, or given up."""
        self.staging -= entry.nbytes
        self._no_room = math.inf

    def add(self, entry: Entry) -> None:
        self._copies[entry.adapter_id] = entry
        self.used += entry.nbytes
        self.touch(entry)

    def remove(self, entry: Entry) -> None:
        del self._copies[entry.adapter_id], self._latest[entry.adapter_id]
        self.used -= entry.nbytes
        self._no_room = math.inf

    def touch(self, entry: Entry) -> None:
        """The entry was used; nothing happens if it has no copy."""
        if entry.adapter_id not in self._copies:
            return
        entry.worth = self._policy.worth(entry)
        self._push(entry)
        if len(self._queue) > 2 * len(self._copies) + 64:
            self._queue = []
            for each in self._copies.values():
                self._push(each)

    def victims(self, nbytes: int, evictable: Callable[[Entry], bool]) -> list[Entry] | None:
        """The copies of least worth whose leaving makes room for `nbytes`; None if nothing does."""
        missing = self.used + nbytes - self.budget
        chosen: list[Entry] = []
        looked_at: list[tuple[float, int, Entry]] = []
        while missing > 0 and self._queue:
            item = heapq.heappop(self._queue)
            _, number, entry = item
            if self._latest.get(entry.adapter_id) != number:
                continue
            looked_at.append(item)
            if evictable(entry):
                chosen.append(entry)
                missing -= entry.nbytes
        for item in looked_at:
            heapq.heappush(self._queue, item)
        return chosen if missing <= 0 else None

    def evict(self, entry: Entry) -> None:
        """Remove a copy for another's sake."""
        self._policy.gone(entry.worth)
        self.remove(entry)

    def _push(self, entry: Entry) -> None:
        self._items += 1
        self._latest[entry.adapter_id] = self._items
        heapq.heappush(self._queue, (entry.worth, self._items, entry))
