"""A tile over an embedding: columns of A are picked instead of multiplied."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_plugin.kernels.plan import Tile
from lora_plugin.kernels.workspace import Workspace


class EmbeddingProduct:
    """y[row] += A[rows of the row's adapter, id]^T B."""

    def __init__(self, tile: Tile, workspace: Workspace) -> None:
        self.picked = workspace.view("raw", tile.height, tile.count)
        self.shrunk, self.dead = self.picked.t(), tile.dead

    def __call__(self, y: Tensor, x: Tensor, a: Tensor, bs: tuple[Tensor, ...]) -> None:
        torch.index_select(a, 1, x, out=self.picked)
        if self.dead is not None:
            self.shrunk.masked_fill_(self.dead, 0)
        y.addmm_(self.shrunk, bs[0])
