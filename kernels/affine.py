"""Outputs scaled and shifted by an adapter's gain and shift, in torch: the last step of its rows."""

from __future__ import annotations

from torch import Tensor

from lora_plugin.kernels.layer import AFFINE_ROWS
from lora_plugin.kernels.runs import Runs


class Adjustment:
    """y[start:stop] becomes y (1 + gain) + shift; the rows are one adapter's, its product already added.

    Attributes:
        span: the arena rows [gain, shift] of the adapter.
    """

    def __init__(self, start: int, stop: int, row: int) -> None:
        self.rows, self.span = slice(start, stop), (row, row + AFFINE_ROWS)

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, bs: tuple[Tensor, ...]) -> None:
        parts = y[self.rows].split_with_sizes([b.shape[1] for b in bs], 1)
        for part, (gain, shift) in zip(parts, bs, strict=True):
            part.addcmul_(part, gain).add_(shift)


def adjustments(runs: Runs) -> tuple[Adjustment, ...]:
    """Those of a step; none where no adapter has a gain and a shift."""
    columns = (column[runs.affine > 0].tolist() for column in (runs.start, runs.stop, runs.hi))
    return tuple(Adjustment(*run) for run in zip(*columns, strict=True))
