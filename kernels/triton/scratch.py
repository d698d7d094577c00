"""What shrink leaves for expand: float32 planes, one memory for all layers of a batch."""

from __future__ import annotations

import torch
from lora_plugin.kernels.triton.tables import CUTS


class Scratch:
    """Planes of `rows` positions times `pitch` ranks; grown when layers are registered, never in a step.

    Args:
        max_rank: the highest rank of any adapter.
    """

    def __init__(self, max_rank: int, device: torch.device) -> None:
        self.pitch = -(-max_rank // 16) * 16
        self.planes = torch.empty(0, dtype=torch.float32, device=device)

    def plane_size(self, rows: int) -> int:
        """Cells of one plane in a launch over `rows` rows."""
        return rows * self.pitch

    def reserve(self, slices: int, max_tokens: int) -> None:
        """Makes room for a layer: for its largest step, and for its split ones."""
        rows = max(max_tokens, *(split * min(most, max_tokens) for most, _, split in CUTS))
        cells = slices * self.plane_size(rows)
        if self.planes.numel() < cells:
            self.planes = self.planes.new_empty(cells)
