"""A tile over an embedding: columns of A are picked instead of multiplied."""

from __future__ import annotations

import torch
from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.plan import Tile
from lora_plugin.kernels.workspace import Workspace
from torch import Tensor


class EmbeddingProduct:
    """y[row] += A[span of the row's adapter, id]^T B."""

    def __init__(self, weights: LayerWeights, tile: Tile, workspace: Workspace) -> None:
        lo, hi = tile.span
        self.a, self.b = weights.a[lo:hi, 0], weights.b[0][lo:hi]
        self.picked = workspace.view("raw", hi - lo, tile.count)
        self.shrunk, self.dead = self.picked.t(), tile.dead

    def __call__(self, y: Tensor, ids: Tensor) -> None:
        torch.index_select(self.a, 1, ids, out=self.picked)
        if self.dead is not None:
            self.shrunk.masked_fill_(self.dead, 0)
        y.addmm_(self.shrunk, self.b)
