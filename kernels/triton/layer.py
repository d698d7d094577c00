"""Launches the kernels over one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.triton import expand as expanding
from lora_plugin.kernels.triton import shrink as shrinking
from lora_plugin.kernels.triton.tables import TABLES, Choice, architecture, choose_shape
from lora_plugin.kernels.triton.tiles import DeviceTiles


class DeviceLayer:
    """A layer on the device; two launches per call, whatever the step holds.

    Nothing that a launch is given depends on the step, only on the shape of y: a captured graph replays
    for any step of at most as many rows.

    Args:
        tiles: the step, and the scratch memory that all layers of a stream share.
        arch: key of the tables; that of the weights' device when None.
    """

    def __init__(self, weights: LayerWeights, tiles: DeviceTiles, arch: str | None = None) -> None:
        self.weights, self.tiles, self.scratch = weights, tiles, tiles.scratch
        self.arch = arch if arch is not None else architecture(weights.a.device)
        self.scratch.reserve(len(weights.b))
        firsts = [sum(weights.widths[:i]) for i in range(len(weights.b))]
        table = [
            [b.data_ptr(), width, first]
            for b, width, first in zip(weights.b, weights.widths, firsts, strict=True)
        ]
        self._slices = torch.tensor(table, dtype=torch.int64, device=weights.a.device)
        self._aligned = all(value % 16 == 0 for row in table for value in row)

    def __call__(self, y: Tensor, x: Tensor) -> None:
        """Adds the adapters' share to y [T, out] from x [T, in] (ids [T] for an embedding).

        Raises:
            ValueError: y or x is not laid out row by row, or of another dtype or shape than the weights.
        """
        self._check(y, x)
        if y.shape[0]:
            choice = choose_shape(self.arch, y.shape[0], y.dtype)
            self._launch(y, x, choice, *self.tiles.of(choice.height))

    def warm_up(self) -> None:
        """Compiles every kernel that a call may need, by launches over no tile."""
        a = self.weights.a
        y = a.new_zeros(1, sum(self.weights.widths))
        embedding = self.weights.kind == "embedding"
        x = a.new_zeros(1, dtype=torch.int32) if embedding else a.new_zeros(1, a.shape[2])
        for most, _ in TABLES[self.arch]:
            choice = choose_shape(self.arch, most, y.dtype)
            count, records = self.tiles.of(choice.height)
            self._launch(y, x, choice, torch.zeros_like(count), records)

    def _launch(self, y: Tensor, x: Tensor, choice: Choice, count: Tensor, records: Tensor) -> None:
        split = self._split(choice)
        step = (count, records, self.tiles.rows)
        tiles = self.tiles.bound(min(y.shape[0], self.tiles.max_tokens), choice.height)
        if self.weights.kind == "embedding":
            self._embed(x, step, tiles, choice)
        else:
            self._shrink(x, step, tiles, split, choice)
        self._expand(y, step, tiles, split, choice)

    def _shrink(self, x: Tensor, step: tuple[Tensor, ...], tiles: int, split: int, choice: Choice) -> None:
        a, shape = self.weights.a, choice.shrink
        slices, in_features = a.shape[1:]
        shrinking.shrink[(tiles, split, slices)](
            x,
            a,
            self.scratch.planes,
            *step,
            x.stride(0),
            a.stride(0),
            in_features,
            self.scratch.plane_size(x.shape[0]),
            self.scratch.pitch,
            SPLIT=split,
            ROWS=choice.height,
            RANKS=shape.ranks,
            DEPTH=shape.extent,
            EVEN=in_features % shape.extent == 0,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )

    def _embed(self, ids: Tensor, step: tuple[Tensor, ...], tiles: int, choice: Choice) -> None:
        a = self.weights.a
        shrinking.embed[(tiles,)](
            ids,
            a,
            self.scratch.planes,
            *step,
            a.shape[2],
            self.scratch.pitch,
            ROWS=choice.height,
            RANKS=16,
            num_warps=choice.shrink.warps,
        )

    def _expand(self, y: Tensor, step: tuple[Tensor, ...], tiles: int, split: int, choice: Choice) -> None:
        shape = choice.expand
        blocks = sum(-(-width // shape.extent) for width in self.weights.widths)
        expanding.expand[(tiles, blocks)](
            y,
            self.scratch.planes,
            self._slices,
            *step,
            y.stride(0),
            self.scratch.plane_size(y.shape[0]),
            self.scratch.pitch,
            SPLIT=split,
            SLICES=len(self.weights.b),
            ROWS=choice.height,
            COLS=shape.extent,
            RANKS=shape.ranks,
            ALIGNED=self._aligned,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )

    def _split(self, choice: Choice) -> int:
        """No more parts than steps along `in`."""
        if self.weights.kind == "embedding":
            return 1
        return min(choice.split, -(-self.weights.in_features // choice.shrink.extent))

    def _check(self, y: Tensor, x: Tensor) -> None:
        embedding = self.weights.kind == "embedding"
        expected: tuple[Any, ...] = (y.shape[0],) if embedding else (y.shape[0], self.weights.in_features)
        if tuple(x.shape) != expected or y.shape[1] != sum(self.weights.widths):
            raise ValueError(f"y {tuple(y.shape)} from x {tuple(x.shape)}, not the layer's shape")
        if y.stride(1) != 1 or x.stride(-1) != 1:
            raise ValueError("the rows of y and x must be contiguous")
        if y.dtype != self.weights.a.dtype or (not embedding and x.dtype != y.dtype):
            raise ValueError(f"y is {y.dtype}, x {x.dtype}, the weights {self.weights.a.dtype}")
