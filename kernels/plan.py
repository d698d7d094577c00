"""How a step is computed: a few tiles, each one product over some rows and a span of the arena.

A tile whose rows use several adapters multiplies all of them with the whole span and masks the
result; a tile of one run needs no mask. Rows between them that are not a tile's own (the base model's) are
either left out, or put back afterwards, bit by bit.
Which runs share a tile is a matter of cost: see `Costs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_plugin.kernels.costs import Costs
from lora_plugin.kernels.runs import IntArray, Runs


@dataclass(frozen=True, eq=False)
class Tile:
    """One product.

    Attributes:
        rows: the batch rows: [start, stop), or int64 indices.
        count: how many.
        span: [lo, hi) of the arena.
        dead: bool [count or 1, hi - lo], true where the row does not use the arena row; None when all do.
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


class Planner:
    """Makes plans for one batch.

    Args:
        arena_rows: rows of the arena.
        max_cells: batch rows times arena rows that the workspace holds for a tile.
    """

    def __init__(self, costs: Costs, arena_rows: int, max_cells: int, device: torch.device) -> None:
        self.costs, self.arena_rows, self.max_cells, self.device = costs, arena_rows, max_cells, device

    def plan(self, runs: Runs) -> tuple[Tile, ...]:
        """The cheaper of two ways: every run where it lies, or the short ones gathered."""
        columns = (column.tolist() for column in runs[:4])
        groups = [
            _Group((i,), start, stop, stop - start, *self._aligned(lo, hi))
            for i, (start, stop, lo, hi) in enumerate(zip(*columns, strict=True))
        ]
        tiles: list[Tile] = []
        for group in self._arrange(groups):
            tiles += self._cut(group, runs) if len(group.runs) == 1 else [self._mask(group, runs)]
        return tuple(tiles)

    def _aligned(self, lo: int, hi: int) -> tuple[int, int]:
        """The span widened to multiples of 8 rows, where the arena has them.

        Over other inner sizes a bfloat16 product of oneDNN reads on into the next row, times zero: that
        row's infinities become NaN in this one.
        """
        return lo // 8 * 8, min((hi + 7) // 8 * 8, self.arena_rows)

    def _arrange(self, groups: list[_Group]) -> list[_Group]:
        placed = self._merge(groups)
        if len(placed) < 2:
            return placed
        limit = self.costs.gather_run
        short = [group._replace(gathered=True) for group in groups if group.own <= limit]
        short.sort(key=lambda group: group.lo)
        mixed = self._merge([group for group in groups if group.own > limit]) + self._merge(short)
        return min(placed, mixed, key=lambda way: sum(group.cost(self.costs) for group in way))

    def _merge(self, groups: list[_Group]) -> list[_Group]:
        """Joins neighbours in the list, pair by pair in rounds, while one tile costs less than two."""
        before = len(groups) + 1
        while len(groups) < before:
            before, waiting, groups = len(groups), groups[::-1], []
            while waiting:
                group = waiting.pop()
                both = self._join(group, waiting[-1]) if waiting else None
                if both is not None:
                    waiting.pop()
                groups.append(both or group)
        return groups

    def _join(self, one: _Group, other: _Group) -> _Group | None:
        both = one.joined(other)
        copied = both.gathered or both.rows > both.own
        if both.cells > self.max_cells or (copied and both.rows > self.costs.copied_rows):
            return None
        return both if both.cost(self.costs) < one.cost(self.costs) + other.cost(self.costs) else None

    def _cut(self, group: _Group, runs: Runs) -> list[Tile]:
        """Tiles of one run; cut when it is too long for the workspace."""
        index, span = group.runs[0], (group.lo, group.hi)
        dead = self._outside(span, runs.lo[index : index + 1], runs.hi[index : index + 1])
        mask = self._tensor(dead) if dead.any() else None
        step = max(1, self.max_cells // (group.hi - group.lo))
        cuts = [(start, min(start + step, group.stop)) for start in range(group.start, group.stop, step)]
        return [Tile(cut, cut[1] - cut[0], span, mask) for cut in cuts]

    def _mask(self, group: _Group, runs: Runs) -> Tile:
        """A tile of several runs."""
        chosen, span = np.asarray(group.runs), (group.lo, group.hi)
        counts = runs.stop[chosen] - runs.start[chosen]
        first = np.repeat(runs.start[chosen] - (np.cumsum(counts) - counts), counts)
        own = first + np.arange(group.own)
        position = np.arange(group.own) if group.gathered else own - group.start
        dead = np.ones((group.rows, group.hi - group.lo), dtype=bool)
        dead[position] = np.repeat(self._outside(span, runs.lo[chosen], runs.hi[chosen]), counts, axis=0)
        foreign = np.ones((group.rows, 1), dtype=bool)
        foreign[position] = False
        return Tile(
            self._tensor(own) if group.gathered else (group.start, group.stop),
            group.rows,
            span,
            self._tensor(dead) if dead.any() else None,
            self._tensor(foreign) if foreign.any() else None,
        )

    def _outside(self, span: tuple[int, int], lo: IntArray, hi: IntArray) -> NDArray[np.bool_]:
        """Per run, the span's arena rows that are not its own."""
        arena_rows = np.arange(*span)
        return (arena_rows < lo[:, None]) | (arena_rows >= hi[:, None])

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
