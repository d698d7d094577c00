"""A tile over a linear layer: one product shrinks for all slices, one per slice expands.

Masked elements are replaced, not multiplied by zero, so that what a row yields with another
adapter (it may overflow) never reaches it.
"""

from __future__ import annotations

import torch
from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.plan import Tile
from lora_plugin.kernels.workspace import Workspace
from torch import Tensor


def multiplications(weights: LayerWeights, tile: Tile) -> int:
    """Those of the largest product."""
    lo, hi = tile.span
    return tile.count * (hi - lo) * max(len(weights.b) * weights.in_features, *weights.widths)


class _Shrunk:
    """x A^T of all slices: as the product leaves it, [count, span, slices], and masked by slice.

    Attributes:
        raw: [count, span * slices]; what the product writes.
        slices: per slice [count, span], valid after `mask`.
    """

    def __init__(self, tile: Tile, slices: int, raw: Tensor, shrunk: Tensor) -> None:
        self.raw, self._dead = raw, tile.dead
        self._by_slice = raw.view(tile.count, -1, slices).permute(2, 0, 1)
        self._shrunk = self._by_slice if slices == 1 else shrunk
        self._zero = raw.new_zeros(())
        self.slices = self._shrunk.unbind()

    def mask(self) -> None:
        if self._shrunk is self._by_slice:
            if self._dead is not None:
                self._shrunk.masked_fill_(self._dead, 0)
        elif self._dead is None:
            self._shrunk.copy_(self._by_slice)
        else:
            torch.where(self._dead, self._zero, self._by_slice, out=self._shrunk)


class LinearProduct:
    """In the serving dtype, added to y within the product."""

    def __init__(self, weights: LayerWeights, tile: Tile, workspace: Workspace) -> None:
        lo, hi = tile.span
        slices, span = len(weights.b), hi - lo
        self.a_t = weights.a[lo:hi].view(span * slices, -1).t()
        raw = workspace.view("raw", tile.count, span * slices)
        self.shrunk = _Shrunk(tile, slices, raw, workspace.view("shrunk", slices, tile.count, span))
        self.pairs = tuple(zip(self.shrunk.slices, (b[lo:hi] for b in weights.b), strict=True))
        self.widths = weights.widths

    def __call__(self, y: Tensor, x: Tensor) -> None:
        torch.mm(x, self.a_t, out=self.shrunk.raw)
        self.shrunk.mask()
        parts = (y,) if len(self.widths) == 1 else y.split_with_sizes(self.widths, 1)
        for part, (shrunk, b) in zip(parts, self.pairs, strict=True):
            part.addmm_(shrunk, b)


class WideProduct:
    """In float32, weights cast on the way: for less work than it takes oneDNN to start a 16-bit product."""

    def __init__(self, weights: LayerWeights, tile: Tile, workspace: Workspace) -> None:
        lo, hi = tile.span
        slices, span, widths = len(weights.b), hi - lo, weights.widths
        self.narrow_a = weights.a[lo:hi].view(span * slices, -1)
        self.x = workspace.view("wide_x", tile.count, weights.in_features)
        self.a = workspace.view("wide_a", *self.narrow_a.shape)
        self.a_t = self.a.t()
        raw = workspace.view("wide_raw", tile.count, span * slices)
        self.shrunk = _Shrunk(tile, slices, raw, workspace.view("wide_shrunk", slices, tile.count, span))
        self.y = workspace.view("wide_y", tile.count, sum(widths))
        bs = [(b[lo:hi], workspace.view("wide_b", span, b.shape[1])) for b in weights.b]
        parts = self.y.split_with_sizes(widths, 1)
        self.parts = tuple(zip(parts, self.shrunk.slices, bs, strict=True))

    def __call__(self, y: Tensor, x: Tensor) -> None:
        self.x.copy_(x)
        self.y.copy_(y)
        self.a.copy_(self.narrow_a)
        torch.mm(self.x, self.a_t, out=self.shrunk.raw)
        self.shrunk.mask()
        for part, shrunk, (narrow_b, b) in self.parts:
            b.copy_(narrow_b)
            part.addmm_(shrunk, b)
        y.copy_(self.y)
