"""A tile made ready for layers of one shape: its views of the workspace are made once per plan."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lora_plugin.kernels.embedding import EmbeddingProduct
from lora_plugin.kernels.layer import Shape
from lora_plugin.kernels.linear import LinearProduct, WideProduct, multiplications
from lora_plugin.kernels.plan import Tile
from lora_plugin.kernels.workspace import Workspace


class Product(Protocol):
    """Adds to y [rows, out], from x [rows, in] or ids [rows], and the tile's span of a layer's arena."""

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, bs: tuple[Tensor, ...]) -> None: ...


def make_product(shape: Shape, tile: Tile, workspace: Workspace, wide_limit: float) -> Product:
    """The tile's product, called with all rows of the step.

    Args:
        wide_limit: multiplications up to which 16-bit weights are cast to float32 first.
    """
    inner: Product
    if shape.kind == "embedding":
        inner = EmbeddingProduct(tile, workspace)
    elif workspace.dtype != torch.float32 and multiplications(shape, tile) <= wide_limit:
        inner = WideProduct(shape, tile, workspace)
    else:
        inner = LinearProduct(shape, tile, workspace)
    if isinstance(tile.rows, Tensor):
        return _Gathered(inner, tile.rows, shape, workspace)
    if tile.foreign is not None:
        inner = _Restored(inner, tile.foreign, shape, workspace)
    return _Placed(inner, slice(*tile.rows))


class _Placed:
    """Consecutive rows, computed where they lie."""

    def __init__(self, inner: Product, rows: slice) -> None:
        self.inner, self.rows = inner, rows

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, bs: tuple[Tensor, ...]) -> None:
        self.inner(y[self.rows], x[self.rows], a, bs)


class _Restored:
    """Consecutive rows of which some are not to be changed: not even -0.0, which adding 0.0 would."""

    def __init__(self, inner: Product, foreign: Tensor, shape: Shape, workspace: Workspace) -> None:
        self.inner, self.foreign = inner, foreign
        self.before = workspace.view("y", len(foreign), sum(shape.widths))

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, bs: tuple[Tensor, ...]) -> None:
        self.before.copy_(y)
        self.inner(y, x, a, bs)
        torch.where(self.foreign, self.before, y, out=y)


class _Gathered:
    """Scattered rows, copied together and back."""

    def __init__(self, inner: Product, rows: Tensor, shape: Shape, workspace: Workspace) -> None:
        self.inner, self.rows = inner, rows
        self.y = workspace.view("y", len(rows), sum(shape.widths))
        self.x: Tensor | None = None  # ids are few and of either integer width: gathered anew
        if shape.kind == "linear":
            self.x = workspace.view("x", len(rows), shape.in_features)

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, bs: tuple[Tensor, ...]) -> None:
        torch.index_select(y, 0, self.rows, out=self.y)
        if self.x is None:
            self.inner(self.y, x.index_select(0, self.rows), a, bs)
        else:
            self.inner(self.y, torch.index_select(x, 0, self.rows, out=self.x), a, bs)
        y.index_copy_(0, self.rows, self.y)
