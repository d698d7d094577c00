"""How a step is computed: a few tiles, each one product over some rows and a span of the arena.

A tile whose rows use several adapters multiplies all of them with the whole span and masks the
result; a tile of one run needs no mask. Rows of the base model are in no tile, so they are never written.
Which runs share a tile is a matter of cost: a product has a fixed price (dispatch, oneDNN's lookup) that
outweighs a lot of arithmetic, and a span holds rows that nobody wants. Costs are microseconds for a
nominal layer, measured on two cores with AMX; only their ratios matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from lora_plugin.kernels.runs import IntArray, Runs
from torch import Tensor

TILE_COST = 60.0
"""A shrink, the mask and the expands of a tile."""
GATHER_COST = 10.0
"""Copying a tile's rows in and out."""
CELL_COST = 0.005
"""One batch row times one arena row."""
GATHER_ROWS = 64
"""Rows of a gathered tile at most; bounds its buffers."""
GATHER_RUN = 16
"""Longer runs are computed where they lie."""


class Limits(NamedTuple):
    """What the workspace holds."""

    cells: int
    """Batch rows times arena rows of a tile."""


@dataclass(frozen=True, eq=False)
class Tile:
    """One product.

    Attributes:
        rows: the batch rows: [start, stop), or int64 indices.
        count: how many.
        span: [lo, hi) of the arena.
        dead: bool [count, hi - lo], true where the row does not use the arena row; None when all do.
    """

    rows: tuple[int, int] | Tensor
    count: int
    span: tuple[int, int]
    dead: Tensor | None


class _Group(NamedTuple):
    """Runs that may become one tile."""

    runs: tuple[int, ...]
    count: int
    lo: int
    hi: int

    def joined(self, other: _Group) -> _Group:
        runs, count = self.runs + other.runs, self.count + other.count
        return _Group(runs, count, min(self.lo, other.lo), max(self.hi, other.hi))

    @property
    def cells(self) -> int:
        return self.count * (self.hi - self.lo)

    @property
    def cost(self) -> float:
        return TILE_COST + CELL_COST * self.cells


def make_plan(runs: Runs, limits: Limits, device: torch.device) -> tuple[Tile, ...]:
    """The cheaper of two ways: every run where it lies, or the short ones gathered."""
    groups = [
        _Group((i,), stop - start, lo, hi)
        for i, (start, stop, lo, hi) in enumerate(zip(*(column.tolist() for column in runs), strict=True))
    ]
    placed = _merge(groups, limits.cells, runs=runs)
    if len(placed) > 1:
        long = _merge([g for g in groups if g.count > GATHER_RUN], limits.cells, runs=runs)
        short = sorted((g for g in groups if g.count <= GATHER_RUN), key=lambda group: group.lo)
        gathered = _merge(short, limits.cells, max_rows=GATHER_ROWS)
        if _cost(long) + _cost(gathered) + GATHER_COST * len(gathered) < _cost(placed):
            tiles = [tile for group in long for tile in _place(group, runs, limits, device)]
            return (*tiles, *(_gather(group, runs, device) for group in gathered))
    return tuple(tile for group in placed for tile in _place(group, runs, limits, device))


def _cost(groups: Iterable[_Group]) -> float:
    return sum(group.cost for group in groups)


def _merge(
    groups: Sequence[_Group], max_cells: int, *, max_rows: int | None = None, runs: Runs | None = None
) -> list[_Group]:
    """Joins neighbours in the list while that is cheaper; with `runs`, only those that touch in the batch."""
    merged: list[_Group] = []
    for group in groups:
        if merged:
            last = merged[-1]
            both = last.joined(group)
            touching = runs is None or runs.stop[last.runs[-1]] == runs.start[group.runs[0]]
            fits = both.cells <= max_cells and (max_rows is None or both.count <= max_rows)
            if touching and fits and both.cost < last.cost + group.cost:
                merged[-1] = both
                continue
        merged.append(group)
    return merged


def _place(group: _Group, runs: Runs, limits: Limits, device: torch.device) -> Iterable[Tile]:
    """Tiles over consecutive batch rows; a run too long for the workspace is cut."""
    start, stop = int(runs.start[group.runs[0]]), int(runs.stop[group.runs[-1]])
    span = (group.lo, group.hi)
    if len(group.runs) > 1:
        yield Tile((start, stop), group.count, span, _dead(group, runs, device))
        return
    step = max(1, limits.cells // (group.hi - group.lo))
    for low in range(start, stop, step):
        high = min(low + step, stop)
        yield Tile((low, high), high - low, span, None)


def _gather(group: _Group, runs: Runs, device: torch.device) -> Tile:
    """A tile over scattered batch rows."""
    chosen = np.asarray(group.runs)
    counts = runs.stop[chosen] - runs.start[chosen]
    offset = np.repeat(runs.start[chosen] - (np.cumsum(counts) - counts), counts)
    rows = torch.from_numpy(offset + np.arange(group.count)).to(device)
    return Tile(rows, group.count, (group.lo, group.hi), _dead(group, runs, device))


def _dead(group: _Group, runs: Runs, device: torch.device) -> Tensor | None:
    chosen = np.asarray(group.runs)
    lo, hi = _per_row(runs.lo, runs, chosen), _per_row(runs.hi, runs, chosen)
    if (lo == group.lo).all() and (hi == group.hi).all():
        return None
    columns = np.arange(group.lo, group.hi)
    return torch.from_numpy((columns < lo[:, None]) | (columns >= hi[:, None])).to(device)


def _per_row(values: IntArray, runs: Runs, chosen: IntArray) -> IntArray:
    return np.repeat(values[chosen], runs.stop[chosen] - runs.start[chosen])
