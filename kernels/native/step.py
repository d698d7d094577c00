"""The step as the kernel reads it."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from lora_plugin.kernels.native.library import StepTable
from lora_plugin.kernels.runs import Sorted, cut

CHUNK_ROWS = 512
"""Rows of an adapter that are computed together: weights are read once for them."""


class NativeStep:
    """The rows of a step, sorted by adapter and cut into chunks; at a fixed address.

    Attributes:
        address: of the table, valid for the life of this object.
        stop: one more than the last batch row that uses an adapter.
        version: changes with every update.
    """

    def __init__(self) -> None:
        self._table = StepTable()
        self.address = ctypes.addressof(self._table)
        self.stop = self.version = 0

    def update(self, step: Sorted) -> None:
        """Describes the next step."""
        self._chunks = cut(step, CHUNK_ROWS)
        shift = step.shift.astype(np.int32).repeat(step.counts)
        self._rows = shift + np.arange(step.rows, dtype=np.int32)
        table = self._table
        table.chunks, table.rows = self._chunks.ctypes.data, self._rows.ctypes.data
        table.count, table.total_rows = len(self._chunks), step.rows
        table.threads, table.max_rank = torch.get_num_threads(), step.records[:, 1].max(initial=0)
        self.stop = step.stop
        self.version += 1
