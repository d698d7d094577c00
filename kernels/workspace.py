"""Buffers that all layers of a batch share; grown when layers are registered, never in a step."""

from __future__ import annotations

import math

import torch
from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.plan import GATHER_ROWS
from torch import Tensor


class Workspace:
    """Flat scratch memory by purpose; one tile is computed at a time, so one of each is enough.

    Args:
        cells: the most batch rows times arena rows of a tile.
    """

    def __init__(self, cells: int, device: torch.device, dtype: torch.dtype) -> None:
        self._cells = cells
        self._flat = {
            name: torch.empty(0, device=device, dtype=dtype) for name in ("raw", "shrunk", "x", "y")
        }

    def reserve(self, weights: LayerWeights) -> None:
        """Makes room for a layer."""
        shrunk = self._cells * len(weights.b)
        sizes = {"raw": shrunk, "shrunk": shrunk, "y": GATHER_ROWS * sum(weights.widths)}
        if weights.kind == "linear":
            sizes["x"] = GATHER_ROWS * weights.in_features
        for name, size in sizes.items():
            if self._flat[name].numel() < size:
                self._flat[name] = self._flat[name].new_empty(size)

    def view(self, name: str, *shape: int) -> Tensor:
        """The beginning of a buffer, in this shape."""
        return self._flat[name][: math.prod(shape)].view(shape)
