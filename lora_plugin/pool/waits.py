"""Requests that wait for room on the device, oldest first, and those that have waited too long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Wait:
    adapter_id: int
    since: float


class Waits:
    """A request waits from the first time that it was refused for want of room until it runs or ends.

    Args:
        bound: seconds; who has waited longer is overdue.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._waits: dict[str, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def begin(self, request_id: str, adapter_id: int, now: float) -> None:
        self._waits.setdefault(request_id, _Wait(adapter_id, now))

    def end(self, request_ids: Iterable[str]) -> None:
        """These run, or are gone; most never waited."""
        if self._waits:
            for request_id in request_ids:
                self._waits.pop(request_id, None)

    def overdue(self, now: float) -> Iterator[int]:
        """The adapters of overdue requests, each once, the one that waited longest first."""
        seen: set[int] = set()
        for wait in self._waits.values():
            if now - wait.since <= self.bound:
                return
            if wait.adapter_id not in seen:
                seen.add(wait.adapter_id)
                yield wait.adapter_id

    def longest(self, now: float) -> float:
        """Seconds that the oldest has waited; 0 when nobody waits."""
        return max(0.0, now - next(iter(self._waits.values())).since) if self._waits else 0.0
