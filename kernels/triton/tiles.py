"""The step as the kernels read it: one packed int32 buffer at a fixed address."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_plugin.kernels.runs import RECORD, Sorted, cut
from lora_plugin.kernels.triton.scratch import Scratch
from lora_plugin.kernels.triton.tables import HEIGHTS, MOST_ROWS

_NONE = np.empty((0, RECORD), dtype=np.int32)


class DeviceTiles:
    """The rows of a step, sorted by adapter and cut into tiles, on the device.

    The buffer holds the number of tiles of each list (a record apart, for alignment), the records of each
    list, and the batch rows in the order of their adapters. A list's unused records are stale: kernels stop
    at its count. Rows of the base model are in no tile. `update` makes one copy and never waits for the
    device.

    Args:
        max_tokens, max_adapters, max_rank: the largest step.
        device: where the layers lie.
    """

    def __init__(self, max_tokens: int, max_adapters: int, max_rank: int, device: torch.device) -> None:
        self.max_tokens, self.max_adapters = max_tokens, max_adapters
        self.scratch = Scratch(max_rank, max_tokens, device)
        self._capacity = {h: self.bound(min(max_tokens, most), h) for h, most in MOST_ROWS.items()}
        starts = np.cumsum([RECORD * len(HEIGHTS), *(RECORD * n for n in self._capacity.values())]).tolist()
        self._record_at = dict(zip(HEIGHTS, starts, strict=False))
        self._rows_at = starts[-1]
        self._positions = np.arange(max_tokens, dtype=np.int32)
        self._pin = device.type == "cuda"
        self.buffer = torch.zeros(self._rows_at + max_tokens, dtype=torch.int32, device=device)
        self.rows = self.buffer[self._rows_at :]
        self._constants: list[tuple[Tensor, Tensor]] = []

    def constant(self, values: Tensor) -> Tensor:
        """A tensor on the device that no step changes."""
        self._constants.append((values.to(self.buffer.device, copy=True), values))
        return self._constants[-1][0]

    def restore(self) -> None:
        """The device's memory lost its content: an empty step, and the constants again."""
        self.buffer.zero_()
        for tensor, values in self._constants:
            tensor.copy_(values)

    def bound(self, rows: int, height: int) -> int:
        """The most tiles of this height that any step of `rows` rows has."""
        return min(rows, self.max_adapters + rows // height)

    def of(self, height: int) -> tuple[Tensor, Tensor]:
        """The count [1] and the records [tiles x RECORD] of a list, as views of the buffer."""
        count, start = RECORD * HEIGHTS.index(height), self._record_at[height]
        return self.buffer[count : count + 1], self.buffer[start : start + RECORD * self._capacity[height]]

    def update(self, step: Sorted) -> None:
        """Describes the next step.

        Raises:
            ValueError: more adapters than `max_adapters`, or a higher rank than `max_rank`.
        """
        self._check(step)
        # The pinned allocator hands a block out again only when its copy has passed, so steps may overlap.
        host = torch.empty(self._rows_at + step.rows, dtype=torch.int32, pin_memory=self._pin)
        self._pack(host.numpy(), step)
        self.buffer[: len(host)].copy_(host, non_blocking=True)

    def _check(self, step: Sorted) -> None:
        if len(step.records) > self.max_adapters:
            raise ValueError(f"{len(step.records)} adapters, at most {self.max_adapters}")
        rank = step.records[:, 1].max(initial=0)
        if rank > self.scratch.max_rank:
            raise ValueError(f"an adapter of rank {rank}, at most {self.scratch.max_rank}")

    def _pack(self, packed: NDArray[np.int32], step: Sorted) -> None:
        shift = step.shift.astype(np.int32).repeat(step.counts)
        np.add(shift, self._positions[: step.rows], out=packed[self._rows_at :])
        for index, height in enumerate(HEIGHTS):
            records = cut(step, height) if step.rows <= MOST_ROWS[height] else _NONE
            packed[RECORD * index] = len(records)
            at = self._record_at[height]
            packed[at : at + records.size] = records.reshape(-1)
