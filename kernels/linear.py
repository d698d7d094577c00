"""A tile over linear layers of one shape: one product shrinks for all slices, one per slice expands.

Masked elements are replaced, not multiplied by zero, so that what a row yields with another
adapter (it may overflow) never reaches it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_plugin.kernels.layer import Shape
from lora_plugin.kernels.plan import Tile
from lora_plugin.kernels.workspace import Workspace


def multiplications(shape: Shape, tile: Tile) -> int:
    """Those of the largest product."""
    return tile.count * tile.height * max(shape.slices * shape.in_features, *shape.widths)


class _Shrunk:
    """x A^T of all slices: as the product leaves it, [count, height, slices], and masked by slice.

    Attributes:
        raw: [count, height * slices]; what the product writes.
        slices: per slice [count, height], valid after `mask`.
    """

    def __init__(self, shape: Shape, tile: Tile, workspace: Workspace, prefix: str) -> None:
        self.raw = workspace.view(f"{prefix}raw", tile.count, tile.height * shape.slices)
        self._by_slice = self.raw.view(tile.count, tile.height, shape.slices).permute(2, 0, 1)
        self._masked = self._by_slice
        if shape.slices > 1:
            self._masked = workspace.view(f"{prefix}shrunk", *self._by_slice.shape)
        self._dead, self._zero = tile.dead, self.raw.new_zeros(())
        self.slices = self._masked.unbind()

    def mask(self) -> None:
        if len(self.slices) == 1:
            if self._dead is not None:
                self._masked.masked_fill_(self._dead, 0)
        elif self._dead is None:
            self._masked.copy_(self._by_slice)
        else:
            torch.where(self._dead, self._zero, self._by_slice, out=self._masked)


class LinearProduct:
    """In the serving dtype, added to y within the product."""

    def __init__(self, shape: Shape, tile: Tile, workspace: Workspace) -> None:
        self.shrunk = _Shrunk(shape, tile, workspace, "")
        self.widths = shape.widths

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, bs: tuple[Tensor, ...]) -> None:
        torch.mm(x, a.t(), out=self.shrunk.raw)
        self.shrunk.mask()
        parts = (y,) if len(bs) == 1 else y.split_with_sizes(self.widths, 1)
        for part, shrunk, b in zip(parts, self.shrunk.slices, bs, strict=True):
            part.addmm_(shrunk, b)


class WideProduct:
    """In float32, weights cast on the way: for less work than it takes oneDNN to start a 16-bit product."""

    def __init__(self, shape: Shape, tile: Tile, workspace: Workspace) -> None:
        self.x = workspace.view("wide_x", tile.count, shape.in_features)
        self.y = workspace.view("wide_y", tile.count, sum(shape.widths))
        self.a = workspace.view("wide_a", tile.height * shape.slices, shape.in_features)
        self.a_t = self.a.t()
        self.shrunk = _Shrunk(shape, tile, workspace, "wide_")
        parts = self.y.split_with_sizes(shape.widths, 1)
        wide_bs = [workspace.view("wide_b", tile.height, width) for width in shape.widths]
        self.expands = tuple(zip(parts, self.shrunk.slices, wide_bs, strict=True))

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, bs: tuple[Tensor, ...]) -> None:
        self.x.copy_(x)
        self.y.copy_(y)
        self.a.copy_(a)
        torch.mm(self.x, self.a_t, out=self.shrunk.raw)
        self.shrunk.mask()
        for (part, shrunk, wide_b), b in zip(self.expands, bs, strict=True):
            part.addmm_(shrunk, wide_b.copy_(b))
        y.copy_(self.y)
