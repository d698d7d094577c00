"""Which host copy goes first: what a copy is worth when it is used, by the policy that the operator chose."""

from __future__ import annotations

from typing import Protocol

from lora_plugin.pool.entry import Entry


class Policy(Protocol):
    """Values copies; asked when a copy comes into the cache and whenever it is used."""

    def worth(self, entry: Entry) -> float:
        """The copy of the lowest worth is the first to go."""
        ...

    def gone(self, worth: float) -> None:
        """A copy of this worth had to go."""
        ...


class LeastRecentlyUsed:
    """The later its last use, the more a copy is worth."""

    def __init__(self) -> None:
        self._uses = 0

    def worth(self, entry: Entry) -> float:
        self._uses += 1
        return self._uses

    def gone(self, worth: float) -> None:
        pass


class ReloadCost:
    """Greedy-Dual-Size-Frequency: uses times the seconds of a reload, per byte, on top of an age.

    The age is the worth of the last copy that had to go: so a copy that was used a lot and is no more falls
    behind in time, and among copies of the same use those go whose bytes are the quickest to bring back.
    """

    def __init__(self) -> None:
        self._age = 0.0

    def worth(self, entry: Entry) -> float:
        return self._age + max(1, entry.uses) * entry.load_seconds / max(1, entry.nbytes)

    def gone(self, worth: float) -> None:
        self._age = max(self._age, worth)


POLICIES: dict[str, type[LeastRecentlyUsed] | type[ReloadCost]] = {
    "lru": LeastRecentlyUsed,
    "cost": ReloadCost,
}
