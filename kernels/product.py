"""A layer's share of a plan: a tile bound to its weights, ready to run.

All views of weights and workspace are made when it is bound, once per plan, and not in every call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from lora_plugin.kernels.embedding import EmbeddingProduct
from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.linear import LinearProduct, WideProduct, multiplications
from lora_plugin.kernels.plan import Tile
from lora_plugin.kernels.workspace import Workspace
from torch import Tensor

Product = Callable[[Tensor, Tensor], None]
"""Adds to y [rows, out], from x [rows, in] or ids [rows]."""


def bind(weights: LayerWeights, tile: Tile, workspace: Workspace, wide_limit: float) -> Product:
    """The tile's product over a layer, called with all rows of the step.

    Args:
        wide_limit: multiplications up to which 16-bit weights are cast to float32 first.
    """
    inner: Product
    if weights.kind == "embedding":
        inner = EmbeddingProduct(weights, tile, workspace)
    elif weights.a.dtype != torch.float32 and multiplications(weights, tile) <= wide_limit:
        inner = WideProduct(weights, tile, workspace)
    else:
        inner = LinearProduct(weights, tile, workspace)
    if isinstance(tile.rows, Tensor):
        return _Gathered(inner, tile.rows, weights, workspace)
    if tile.foreign is not None:
        inner = _Restored(inner, tile.foreign, weights, workspace)
    return _Placed(inner, slice(*tile.rows))


class _Placed:
    """Consecutive rows, computed where they lie."""

    def __init__(self, inner: Product, rows: slice) -> None:
        self.inner, self.rows = inner, rows

    def __call__(self, y: Tensor, x: Tensor) -> None:
        self.inner(y[self.rows], x[self.rows])


class _Restored:
    """Consecutive rows of which some are not to be changed: not even -0.0, which adding 0.0 would."""

    def __init__(self, inner: Product, foreign: Tensor, weights: LayerWeights, workspace: Workspace) -> None:
        self.inner, self.foreign = inner, foreign
        self.before = workspace.view("y", len(foreign), sum(weights.widths))

    def __call__(self, y: Tensor, x: Tensor) -> None:
        self.before.copy_(y)
        self.inner(y, x)
        torch.where(self.foreign, self.before, y, out=y)


class _Gathered:
    """Scattered rows, copied together and back."""

    def __init__(self, inner: Product, rows: Tensor, weights: LayerWeights, workspace: Workspace) -> None:
        self.inner, self.rows = inner, rows
        self.y = workspace.view("y", len(rows), sum(weights.widths))
        self.x: Tensor | None = None  # ids are few and of either integer width: gathered anew
        if weights.kind == "linear":
            self.x = workspace.view("x", len(rows), weights.in_features)

    def __call__(self, y: Tensor, x: Tensor) -> None:
        torch.index_select(y, 0, self.rows, out=self.y)
        if self.x is None:
            self.inner(self.y, x.index_select(0, self.rows))
        else:
            self.inner(self.y, torch.index_select(x, 0, self.rows, out=self.x))
        y.index_copy_(0, self.rows, self.y)
