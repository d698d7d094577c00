"""A step's rows as runs, maximal stretches of consecutive rows that use the same adapter; and by adapter."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer[Any]]
RECORD = 8
"""int32 of a piece of an adapter's rows: first arena row, rank, first position, rows, affine; padded."""


class Runs(NamedTuple):
    """Runs in row order, without the base model's; int64 arrays of one length.

    Run i is the batch rows [start, stop) and uses the arena rows [lo, hi), and the next two if it is affine.
    """

    start: IntArray
    stop: IntArray
    lo: IntArray
    hi: IntArray
    affine: IntArray


def find_runs(
    adapters: IntArray,
    counts: IntArray,
    first_rows: IntArray,
    ranks: IntArray,
    affine: IntArray | None = None,
) -> Runs:
    """Runs of a step; an adapter of rank 0 is the base model.

    Args:
        adapters: [requests] index into `first_rows` and `ranks`, or -1.
        counts: [requests] consecutive rows of each request.
        first_rows, ranks: [entries] arena rows of each adapter.
        affine: [entries] 1 for an adapter with a gain and a shift row after them, else 0; None for none.
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
    adjusted = np.zeros_like(lo) if affine is None else affine[entry].astype(np.int64)
    return Runs(start[opens], stop[closes], lo, lo + ranks[entry], adjusted)


class Sorted(NamedTuple):
    """Runs in the order of their adapters.

    Attributes:
        shift, counts: per run, what to add to positions for batch rows, and how many there are.
        lo, rank, affine: per adapter, its arena rows [lo, lo + rank), and whether a gain and a shift follow.
        begins, totals: per adapter, its first position and its batch rows.
        rows: batch rows in all.
    """

    shift: NDArray[np.int32]
    counts: IntArray
    lo: IntArray
    rank: IntArray
    affine: IntArray
    begins: IntArray
    totals: IntArray
    rows: int


def sort_by_adapter(runs: Runs) -> Sorted:
    """An adapter's runs come together, in row order."""
    order = np.argsort(runs.lo, kind="stable")
    start, lo, rank = runs.start[order], runs.lo[order], (runs.hi - runs.lo)[order]
    counts = runs.stop[order] - start
    new = np.ones(len(lo), dtype=bool)
    np.not_equal(lo[1:], lo[:-1], out=new[1:])
    opens = np.flatnonzero(new)
    ends = np.cumsum(counts)
    rows = int(ends[-1]) if len(ends) else 0
    begins = ends - counts
    shift = (start - begins).astype(np.int32)
    firsts = begins[opens]
    affine = runs.affine[order][opens]
    totals = np.diff(firsts, append=rows)
    return Sorted(shift, counts, lo[opens], rank[opens], affine, firsts, totals, rows)


def cut(step: Sorted, height: int) -> NDArray[np.int32]:
    """[tiles, RECORD] records: the adapters' rows in pieces of `height`."""
    tiles = -(-step.totals // height)
    adapter = np.repeat(np.arange(len(tiles)), tiles)
    skipped = height * (np.arange(len(adapter)) - (np.cumsum(tiles) - tiles)[adapter])
    records = np.zeros((len(adapter), RECORD), dtype=np.int32)
    records[:, 0], records[:, 1] = step.lo[adapter], step.rank[adapter]
    records[:, 2] = step.begins[adapter] + skipped
    np.minimum(step.totals[adapter] - skipped, height, out=records[:, 3], casting="unsafe")
    records[:, 4] = step.affine[adapter]
    return records
