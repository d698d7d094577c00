"""How values are spread over buckets: what a histogram is made from, as plain data for RPC."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, Self

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Distribution:
    """Counts of values by bucket, and their sum; not thread-safe.

    Args:
        bounds: the buckets' upper bounds, ascending, each inclusive; above the last is one more.
    """

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def to_dict(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}

    @classmethod
    def total(cls, parts: Iterable[dict[str, Any]]) -> Self:
        """All of these together, as `to_dict` gave them; they have the same bounds."""
        parts = list(parts)
        total = cls(parts[0]["bounds"] if parts else SECONDS)
        for part in parts:
            total.counts = [a + b for a, b in zip(total.counts, part["counts"], strict=True)]
            total.sum += part["sum"]
        return total
