"""A layer's share of a plan: the tiles bound to its weights, ready to run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.plan import Tile
from lora_plugin.kernels.workspace import Workspace
from torch import Tensor

Product = Callable[[Tensor, Tensor], None]
"""Adds one tile to y [T, out], from x [T, in] or ids [T]."""


def bind(weights: LayerWeights, tile: Tile, workspace: Workspace) -> Product:
    """A tile over one layer; all views of weights and workspace are made here, once per plan."""
    core = (
        _Embedding(weights, tile, workspace)
        if weights.kind == "embedding"
        else _Linear(weights, tile, workspace)
    )
    if isinstance(tile.rows, Tensor):
        return _Gathered(core, weights, tile, workspace)
    return _Placed(core, weights, *tile.rows)


class _Linear:
    """Shrinks all slices in one product, expands each into its part of y."""

    def __init__(self, weights: LayerWeights, tile: Tile, workspace: Workspace) -> None:
        lo, hi = tile.span
        slices, span = len(weights.b), hi - lo
        self.a_t = weights.a[lo:hi].view(span * slices, -1).t()
        self.raw = workspace.view("raw", tile.count, span * slices)
        self.by_slice = self.raw.view(tile.count, span, slices).permute(2, 0, 1)
        self.shrunk = self.by_slice if slices == 1 else workspace.view("shrunk", slices, tile.count, span)
        self.dead, self.zero = tile.dead, self.raw.new_zeros(())
        self.pairs = [(self.shrunk[i], b[lo:hi]) for i, b in enumerate(weights.b)]

    def __call__(self, parts: tuple[Tensor, ...], x: Tensor) -> None:
        torch.mm(x, self.a_t, out=self.raw)
        self._mask()
        for y, (shrunk, b) in zip(parts, self.pairs, strict=True):
            y.addmm_(shrunk, b)

    def _mask(self) -> None:
        if self.dead is None:
            if self.shrunk is not self.by_slice:
                self.shrunk.copy_(self.by_slice)
        elif self.shrunk is self.by_slice:
            self.shrunk.masked_fill_(self.dead, 0)
        else:
            torch.where(self.dead, self.zero, self.by_slice, out=self.shrunk)


class _Embedding:
    """Picks columns of A instead of multiplying."""

    def __init__(self, weights: LayerWeights, tile: Tile, workspace: Workspace) -> None:
        lo, hi = tile.span
        self.a = weights.a[lo:hi, 0]
        self.b = weights.b[0][lo:hi]
        self.raw = workspace.view("raw", hi - lo, tile.count)
        self.dead = tile.dead

    def __call__(self, parts: tuple[Tensor, ...], ids: Tensor) -> None:
        torch.index_select(self.a, 1, ids, out=self.raw)
        shrunk = self.raw.t()
        if self.dead is not None:
            shrunk.masked_fill_(self.dead, 0)
        parts[0].addmm_(shrunk, self.b)


class _Placed:
    """Consecutive rows, computed where they lie."""

    def __init__(self, core: _Linear | _Embedding, weights: LayerWeights, start: int, stop: int) -> None:
        self.core, self.rows, self.widths = core, slice(start, stop), weights.widths

    def __call__(self, y: Tensor, x: Tensor) -> None:
        y = y[self.rows]
        parts = y.split_with_sizes(self.widths, 1) if len(self.widths) > 1 else (y,)
        self.core(parts, x[self.rows])


class _Gathered:
    """Scattered rows, copied together and back."""

    def __init__(
        self, core: _Linear | _Embedding, weights: LayerWeights, tile: Tile, workspace: Workspace
    ) -> None:
        assert isinstance(tile.rows, Tensor)
        self.core, self.rows = core, tile.rows
        self.y = workspace.view("y", tile.count, sum(weights.widths))
        self.parts = self.y.split_with_sizes(weights.widths, 1)
        linear = weights.kind == "linear"
        # Token ids may be int32 or int64: their gather allocates, it is a few bytes.
        self.x = workspace.view("x", tile.count, weights.in_features) if linear else None

    def __call__(self, y: Tensor, x: Tensor) -> None:
        gathered = torch.index_select(x, 0, self.rows, out=self.x)
        torch.index_select(y, 0, self.rows, out=self.y)
        self.core(self.parts, gathered)
        y.index_copy_(0, self.rows, self.y)
