"""How a step is computed: a few tiles, each one product over some rows and a span of the arena.

A tile whose rows use several adapters multiplies all of them with the whole span and masks the
result; a tile of one run needs no mask. Rows between them that are not a tile's own (the base model's) are
either left out, or put back afterwards, bit by bit.
Which runs share a tile is a matter of cost: see `Costs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from lora_plugin.kernels.costs import Costs
from lora_plugin.kernels.runs import Runs
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Tile:
    """One product.

    Attributes:
        rows: the batch rows: [start, stop), or int64 indices.
        count: how many.
        span: [lo, hi) of the arena.
        dead: bool [count, hi - lo], true where the row does not use the arena row; None when all do.
        foreign: bool [count, 1], true for rows between the tile's own, which must stay as they are; or None.
    """

    rows: tuple[int, int] | Tensor
    count: int
    span: tuple[int, int]
    dead: Tensor | None = None
    foreign: Tensor | None = None

    @property
    def height(self) -> int:
        """Arena rows of the span."""
        return self.span[1] - self.span[0]


class _Group(NamedTuple):
    """Runs that share a tile.

    Attributes:
        runs: which, in the order of the tile's rows.
        start, stop: where the first begins and the last ends in the batch.
        own: rows of the runs; fewer than stop - start when there are others between them.
        lo, hi: the span of the arena.
        gathered: own rows are copied together, else the batch rows [start, stop) are computed where they lie.
    """

    runs: tuple[int, ...]
    start: int
    stop: int
    own: int
    lo: int
    hi: int
    gathered: bool = False

    @property
    def rows(self) -> int:
        return self.own if self.gathered else self.stop - self.start

    @property
    def cells(self) -> int:
        return self.rows * (self.hi - self.lo)

    def cost(self, costs: Costs) -> float:
        moving = costs.gather if self.gathered else costs.restore if self.rows > self.own else 0
        return costs.of(self.rows, self.hi - self.lo) + moving

    def joined(self, other: _Group) -> _Group:
        """Both in one; meaningless unless `other` comes later in the batch, or both are gathered."""
        return _Group(
            self.runs + other.runs,
            self.start,
            other.stop,
            self.own + other.own,
            min(self.lo, other.lo),
            max(self.hi, other.hi),
            self.gathered,
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
    return tuple(
        tile
        for group in _arrange(groups, costs, max_cells)
        for tile in (_cut(group, max_cells) if len(group.runs) == 1 else (_mask(group, runs, device),))
    )


def _arrange(groups: list[_Group], costs: Costs, max_cells: int) -> list[_Group]:
    placed = _merge(groups, costs, max_cells)
    if len(placed) < 2:
        return placed
    short = [group._replace(gathered=True) for group in groups if group.own <= costs.gather_run]
    short.sort(key=lambda group: group.lo)
    long = [group for group in groups if group.own > costs.gather_run]
    mixed = _merge(long, costs, max_cells) + _merge(short, costs, max_cells)
    return min(placed, mixed, key=lambda way: sum(group.cost(costs) for group in way))


def _merge(groups: Sequence[_Group], costs: Costs, max_cells: int) -> list[_Group]:
    """Joins neighbours in the list while one tile costs less than two."""
    merged = list(groups[:1])
    for group in groups[1:]:
        last = merged[-1]
        both = last.joined(group)
        copied = both.gathered or both.rows > both.own
        fits = both.cells <= max_cells and (both.rows <= costs.copied_rows or not copied)
        if fits and both.cost(costs) < last.cost(costs) + group.cost(costs):
            merged[-1] = both
        else:
            merged.append(group)
    return merged


def _cut(group: _Group, max_cells: int) -> Iterator[Tile]:
    """Tiles of one run, which needs neither copies nor a mask; cut when too long for the workspace."""
    step = max(1, max_cells // (group.hi - group.lo))
    for start in range(group.start, group.stop, step):
        stop = min(start + step, group.stop)
        yield Tile((start, stop), stop - start, (group.lo, group.hi))


def _mask(group: _Group, runs: Runs, device: torch.device) -> Tile:
    """A tile of several runs."""
    chosen = np.asarray(group.runs)
    counts = runs.stop[chosen] - runs.start[chosen]
    first = np.repeat(runs.start[chosen] - (np.cumsum(counts) - counts), counts)
    own = first + np.arange(group.own)
    position = np.arange(group.own) if group.gathered else own - group.start
    lo, hi = np.repeat(runs.lo[chosen], counts), np.repeat(runs.hi[chosen], counts)
    arena_rows = np.arange(group.lo, group.hi)
    dead = np.ones((group.rows, len(arena_rows)), dtype=bool)
    dead[position] = (arena_rows < lo[:, None]) | (arena_rows >= hi[:, None])
    foreign = np.ones((group.rows, 1), dtype=bool)
    foreign[position] = False

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Tile(
        tensor(own) if group.gathered else (group.start, group.stop),
        group.rows,
        (group.lo, group.hi),
        tensor(dead) if dead.any() else None,
        tensor(foreign) if foreign.any() else None,
    )
