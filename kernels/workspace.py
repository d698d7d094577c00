"""Buffers that all layers of a batch share; grown when layers are registered, never in a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lora_plugin.kernels.costs import Costs
from lora_plugin.kernels.layer import Shape


class Workspace:
    """Flat scratch memory by purpose; one tile is computed at a time, so one of each is enough.

    `wide_` buffers are float32, the others in the serving dtype; a page that is never used is never backed.

    Args:
        max_cells: the most batch rows times arena rows of a tile.
        costs: bounds the copied rows and the float32 products.
    """

    def __init__(self, max_cells: int, costs: Costs, device: torch.device, dtype: torch.dtype) -> None:
        self.max_cells, self._costs = max_cells, costs
        self._device, self.dtype = device, dtype
        self._flat: dict[str, Tensor] = {}

    def reserve(self, shape: Shape) -> None:
        """Makes room for layers of this shape."""
        slices, copied_rows = shape.slices, self._costs.copied_rows
        self._grow(self.max_cells * slices, "raw", "shrunk")
        self._grow(copied_rows * sum(shape.widths), "y")
        if shape.kind == "linear":
            self._grow(copied_rows * shape.in_features, "x")
            wide = int(self._costs.wide_limit)
            self._grow(wide, "wide_x", "wide_a", "wide_b", "wide_raw", "wide_shrunk")
            self._grow(wide * slices, "wide_y")

    def view(self, name: str, *shape: int) -> Tensor:
        """The beginning of a buffer, in this shape."""
        return self._flat[name][: math.prod(shape)].view(shape)

    def _grow(self, size: int, *names: str) -> None:
        for name in names:
            if name not in self._flat or self._flat[name].numel() < size:
                dtype = torch.float32 if name.startswith("wide_") else self.dtype
                self._flat[name] = torch.empty(size, device=self._device, dtype=dtype)
