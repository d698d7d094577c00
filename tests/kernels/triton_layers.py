"""A layer on a CPU "device", and what the kernels must make of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton_strict import StrictBuilder, interpreted

from lora_plugin.kernels import reference
from lora_plugin.kernels.layer import AFFINE_ROWS, LayerWeights
from lora_plugin.kernels.runs import RECORD, sort_by_adapter
from lora_plugin.kernels.triton import expand, layer, shrink
from lora_plugin.kernels.triton.layer import DeviceLayer
from lora_plugin.kernels.triton.tables import HEIGHTS
from lora_plugin.kernels.triton.tiles import DeviceTiles

__all__ = ["Step", "Subject", "assert_close", "expand", "layer", "shrink"]

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error over the largest output; a few units in the last place."""


class Step(NamedTuple):
    """Requests in row order: the adapter of each (-1: base), and its rows."""

    adapters: Sequence[int]
    counts: Sequence[int]

    @property
    def row_adapters(self) -> np.ndarray:
        return np.repeat(np.asarray(self.adapters, int), np.asarray(self.counts, int))


class Subject:
    """A layer with adapters of the given ranks; every arena row that nobody owns is NaN, the planes too."""

    def __init__(
        self,
        ranks: Sequence[int],
        in_features: int,
        widths: Sequence[int],
        dtype: torch.dtype,
        *,
        max_tokens: int = 512,
        kind: str = "linear",
        arch: str = "sm_90",
        affine: Sequence[int] = (),
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.ranks = np.asarray(ranks)
        self.first_rows = 3 + np.cumsum(self.ranks + 5) - self.ranks
        rows = int(self.first_rows[-1] + self.ranks[-1]) + AFFINE_ROWS
        owned = np.concatenate([np.arange(f, f + r) for f, r in zip(self.first_rows, ranks, strict=True)])
        self.affine = np.isin(np.arange(len(ranks)), affine).astype(np.int64)
        adjusting = np.add.outer((self.first_rows + self.ranks)[self.affine > 0], range(AFFINE_ROWS)).ravel()
        a = torch.full((rows, len(widths), in_features), torch.nan).to(dtype)
        b = tuple(torch.full((rows, width), torch.nan).to(dtype) for width in widths)
        a[owned] = self.random(len(owned), *a.shape[1:], dtype=dtype)
        for part in b:
            part[owned] = self.random(len(owned), part.shape[1], dtype=dtype)
            part[adjusting] = self.random(len(adjusting), part.shape[1], dtype=dtype)
        self.weights = LayerWeights(a, b, kind)  # type: ignore[arg-type]
        self.tiles = DeviceTiles(max_tokens, len(ranks), int(self.ranks.max()), CPU)
        self.layer = DeviceLayer(self.weights, self.tiles, arch)

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def inputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """y and x (or ids), views with gaps between their rows."""
        dtype, width = self.weights.a.dtype, sum(self.weights.widths)
        y = self.random(rows, width + 16, dtype=dtype)[:, 8 : width + 8]
        if self.weights.kind == "embedding":
            return y, torch.randint(self.weights.in_features, (rows,), generator=self.generator)
        return y, self.random(rows, self.weights.in_features + 16, dtype=dtype)[:, :-16]

    def set_step(self, step: Step) -> None:
        arrays = (np.asarray(step.adapters, np.int64), np.asarray(step.counts, np.int64))
        self.tiles.update(sort_by_adapter(*arrays, self.first_rows, self.ranks, self.affine))
        # Records past the count are whatever the memory held: here tiles of an adapter, to be seen if used.
        stale = torch.tensor([self.first_rows[0], self.ranks[0], 0, 1, 0, 0, 0, 0], dtype=torch.int32)
        for height in HEIGHTS:
            count, records = self.tiles.of(height)
            records.view(-1, RECORD)[int(count) :] = stale

    def run(self, y: Tensor, x: Tensor) -> StrictBuilder:
        """Runs the kernels in strict mode over poisoned planes."""
        self.tiles.scratch.planes.fill_(torch.nan)
        with interpreted(layer.shrinking, layer.expanding) as builder:
            builder.allow(*self.weights.b)
            self.layer(y, x)
        return builder

    def expected(self, y: Tensor, x: Tensor, step: Step) -> Tensor:
        """float64 [rows, out]."""
        extents = [(first, first + rank) for first, rank in zip(self.first_rows, self.ranks, strict=True)]
        rows = [extents[adapter] if adapter >= 0 else None for adapter in step.row_adapters]
        function = reference.lora_embed if self.weights.kind == "embedding" else reference.lora_apply
        affine = {extents[i] for i in np.flatnonzero(self.affine)}
        return function(y, x, self.weights, rows, affine)

    def check(self, step: Step, rows: int | None = None) -> Tensor:
        """Runs a step over `rows` rows of y and compares it; returns y."""
        y, x = self.inputs(sum(step.counts) if rows is None else rows)
        whole = y.clone() if y._base is None else y._base
        before, expected = whole.clone(), self.expected(y, x, step)
        self.set_step(step)
        self.run(y, x)
        assert_close(y, expected)
        assert_untouched(whole, before, y, np.flatnonzero(step.row_adapters >= 0))
        return y


def assert_close(y: Tensor, expected: Tensor) -> None:
    if y.numel():
        error = (y.double() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[y.dtype], f"off by {error:.2e}"


def assert_untouched(whole: Tensor, before: Tensor, y: Tensor, written: np.ndarray) -> None:
    """All but the columns of y in the written rows is bitwise what it was."""
    first = y.storage_offset()
    whole, before = whole.clone(), before.clone()
    whole[written, first : first + y.shape[1]] = 0
    before[written, first : first + y.shape[1]] = 0
    bits = torch.int32 if y.itemsize == 4 else torch.int16
    assert torch.equal(whole.view(bits), before.view(bits))
