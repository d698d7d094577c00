"""A step's rows as runs: maximal stretches of consecutive rows that use the same adapter."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer[Any]]


class Runs(NamedTuple):
    """Runs in row order, without the base model's; int64 arrays of one length.

    Run i is the batch rows [start, stop) and uses the arena rows [lo, hi).
    """

    start: IntArray
    stop: IntArray
    lo: IntArray
    hi: IntArray


def find_runs(adapters: IntArray, counts: IntArray, first_rows: IntArray, ranks: IntArray) -> Runs:
    """Runs of a step; an adapter of rank 0 is the base model.

    Args:
        adapters: [requests] index into `first_rows` and `ranks`, or -1.
        counts: [requests] consecutive rows of each request.
        first_rows, ranks: [entries] arena rows of each adapter.
    """
    stop = np.cumsum(counts, dtype=np.int64)
    entry = np.asarray(adapters, dtype=np.int64)
    keep = (entry >= 0) & (counts > 0)
    if len(ranks):
        keep &= ranks[entry] > 0
    entry, stop = entry[keep], stop[keep]
    start = stop - counts[keep]
    joined = np.zeros(len(entry) + 1, dtype=bool)
    joined[1:-1] = (entry[1:] == entry[:-1]) & (start[1:] == stop[:-1])
    opens, closes = ~joined[:-1], ~joined[1:]
    entry = entry[opens]
    lo = first_rows[entry].astype(np.int64)
    return Runs(start[opens], stop[closes], lo, lo + ranks[entry])
