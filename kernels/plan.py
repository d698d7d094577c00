"""How a step is computed: a few tiles, each one product over some rows and a span of the arena.

A tile whose rows use several adapters multiplies all of them with the whole span and masks the
result; a tile of one run needs no mask. Rows of the base model are in no tile, so they are never written.
Which runs share a tile is a matter of cost: see `Costs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from lora_plugin.kernels.costs import Costs
from lora_plugin.kernels.runs import IntArray, Runs
from torch import Tensor


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
    """Runs that share a tile; `start` and `stop` are those of the first and the last."""

    runs: tuple[int, ...]
    start: int
    stop: int
    count: int
    lo: int
    hi: int

    @property
    def span(self) -> int:
        return self.hi - self.lo

    def joined(self, other: _Group) -> _Group:
        return _Group(
            self.runs + other.runs,
            self.start,
            other.stop,
            self.count + other.count,
            min(self.lo, other.lo),
            max(self.hi, other.hi),
        )


def make_plan(runs: Runs, costs: Costs, max_cells: int, device: torch.device) -> tuple[Tile, ...]:
    """The cheaper of two ways: every run where it lies, or the short ones gathered.

    Args:
        max_cells: batch rows times arena rows that the workspace holds for a tile.
    """
    columns = (column.tolist() for column in runs)
    groups = [
        _Group((i,), start, stop, stop - start, lo, hi)
        for i, (start, stop, lo, hi) in enumerate(zip(*columns, strict=True))
    ]
    placed, gathered = _arrange(groups, costs, max_cells)
    tiles = [tile for group in placed for tile in _place(group, runs, max_cells, device)]
    return (*tiles, *(_gather(group, runs, device) for group in gathered))


def _arrange(groups: list[_Group], costs: Costs, max_cells: int) -> tuple[list[_Group], list[_Group]]:
    """Groups to compute where they lie, and groups to gather."""
    placed = _merge(groups, costs, max_cells)
    if len(placed) < 2:
        return placed, []
    short = sorted((group for group in groups if group.count <= costs.gather_run), key=lambda group: group.lo)
    gathered = _merge(short, costs, max_cells, gathered=True)
    long = _merge([group for group in groups if group.count > costs.gather_run], costs, max_cells)
    mixed = _cost(long, costs) + _cost(gathered, costs) + costs.gather * len(gathered)
    return (long, gathered) if mixed < _cost(placed, costs) else (placed, [])


def _cost(groups: Sequence[_Group], costs: Costs) -> float:
    return sum(costs.of(group.count, group.span) for group in groups)


def _merge(groups: Sequence[_Group], costs: Costs, max_cells: int, *, gathered: bool = False) -> list[_Group]:
    """Joins neighbours in the list while that is cheaper; unless gathered, only neighbours in the batch."""
    merged = list(groups[:1])
    for group in groups[1:]:
        last = merged[-1]
        both = last.joined(group)
        allowed = both.count <= costs.gather_rows if gathered else last.stop == group.start
        apart = _cost((last, group), costs) + (costs.gather if gathered else 0)
        if allowed and both.count * both.span <= max_cells and costs.of(both.count, both.span) < apart:
            merged[-1] = both
        else:
            merged.append(group)
    return merged


def _place(group: _Group, runs: Runs, max_cells: int, device: torch.device) -> Iterator[Tile]:
    """Tiles over consecutive batch rows; a run too long for the workspace is cut."""
    span = (group.lo, group.hi)
    if len(group.runs) > 1:
        yield Tile((group.start, group.stop), group.count, span, _dead(group, runs, device))
        return
    step = max(1, max_cells // group.span)
    for start in range(group.start, group.stop, step):
        stop = min(start + step, group.stop)
        yield Tile((start, stop), stop - start, span, None)


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
    arena_rows = np.arange(group.lo, group.hi)
    return torch.from_numpy((arena_rows < lo[:, None]) | (arena_rows >= hi[:, None])).to(device)


def _per_row(values: IntArray, runs: Runs, chosen: IntArray) -> IntArray:
    return np.repeat(values[chosen], runs.stop[chosen] - runs.start[chosen])
