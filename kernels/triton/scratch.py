"""What shrink leaves for expand: float32 planes, one memory for all layers of a batch."""

from __future__ import annotations

import torch

from lora_plugin.kernels.triton.tables import CUTS


class Scratch:
    """Planes of positions times `pitch` ranks; grown when layers are registered, never in a step.

    Args:
        max_rank, max_tokens: the highest rank of any adapter, the most rows of a step.
    """

    def __init__(self, max_rank: int, max_tokens: int, device: torch.device) -> None:
        self.max_rank, self.max_tokens = max_rank, max_tokens
        self.pitch = -(-max_rank // 16) * 16
        self.planes = torch.empty(0, dtype=torch.float32, device=device)

    def plane_size(self, rows: int) -> int:
        """Cells of one plane in a launch over `rows` rows of y."""
        return min(rows, self.max_tokens) * self.pitch

    def reserve(self, slices: int) -> None:
        """Makes room for a layer: for its largest step, and for the ones with several parts."""
        cells = slices * max(
            self.plane_size(self.max_tokens), *(split * self.plane_size(most) for most, _, split in CUTS)
        )
        if self.planes.numel() < cells:
            self.planes = self.planes.new_empty(cells)
