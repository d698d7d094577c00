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
    kept = _with_adapter(adapters, counts, ranks)
    entry, stop = adapters[kept], counts.cumsum(dtype=np.int64)[kept]
    start = stop - counts[kept]
    apart = np.ones(len(entry) + 1, dtype=bool)
    np.logical_or(entry[1:] != entry[:-1], start[1:] != stop[:-1], out=apart[1:-1])
    opens, closes = apart[:-1], apart[1:]
    entry = entry[opens]
    lo = first_rows[entry].astype(np.int64)
    adjusted = np.zeros_like(lo) if affine is None else affine[entry].astype(np.int64)
    return Runs(start[opens], stop[closes], lo, lo + ranks[entry], adjusted)


class Sorted(NamedTuple):
    """A step's rows in the order of their adapters.

    Attributes:
        shift, counts: per request, what to add to positions for batch rows, and how many there are.
        records: [adapters, RECORD] all rows of each adapter as one piece.
        rows: batch rows in all, without the base model's.
        stop: one more than the last of these batch rows.
    """

    shift: IntArray
    counts: IntArray
    records: NDArray[np.int32]
    rows: int
    stop: int


def sort_by_adapter(
    adapters: IntArray,
    counts: IntArray,
    first_rows: IntArray,
    ranks: IntArray,
    affine: IntArray | None = None,
) -> Sorted:
    """An adapter's requests come together, in row order; the arguments are those of `find_runs`."""
    kept = _with_adapter(adapters, counts, ranks)
    stops = counts.cumsum(dtype=np.int64)
    stop = int(stops[kept[-1]]) if len(kept) else 0
    order = kept[adapters[kept].argsort(kind="stable")]
    entry, rows = adapters[order], counts[order]
    ends = rows.cumsum(dtype=np.int64)
    new = np.ones(len(entry), dtype=bool)
    np.not_equal(entry[1:], entry[:-1], out=new[1:])
    opens = new.nonzero()[0]
    entry = entry[opens]
    records = np.zeros((len(opens), RECORD), dtype=np.int32)
    records[:, 0], records[:, 1] = first_rows[entry], ranks[entry]
    records[:, 2], records[:, 3] = (ends - rows)[opens], np.add.reduceat(rows, opens)
    if affine is not None:
        records[:, 4] = affine[entry]
    return Sorted(stops[order] - ends, rows, records, int(ends[-1]) if len(ends) else 0, stop)


def _with_adapter(adapters: IntArray, counts: IntArray, ranks: IntArray) -> IntArray:
    """Which requests have rows that an adapter changes; one of rank 0 changes none."""
    keep = (adapters >= 0) & (counts > 0)
    if len(ranks):
        keep &= ranks[adapters] > 0
    return keep.nonzero()[0]


def cut(step: Sorted, height: int) -> NDArray[np.int32]:
    """[tiles, RECORD] records: the adapters' rows in pieces of `height`."""
    tiles = -(-step.records[:, 3] // height)
    if tiles.max(initial=0) <= 1:
        return step.records
    records = step.records.repeat(tiles, axis=0)
    skipped = height * (np.arange(len(records)) - (tiles.cumsum() - tiles).repeat(tiles))
    records[:, 2] += skipped
    records[:, 3] -= skipped
    np.minimum(records[:, 3], height, out=records[:, 3])
    return records
