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
        self._slices = tiles.constant(torch.tensor(table, dtype=torch.int64))
        self._aligned = all(value % 16 == 0 for row in table for value in row)

    def __call__(self, y: Tensor, x: Tensor) -> None:
        """Adds the adapters' share to y [T, out] from x [T, in] (ids [T] for an embedding).

        Raises:
            ValueError: y or x is not laid out row by row, or of another dtype or shape than the weights.
        """
        if y.shape[0] != x.shape[0]:
            raise ValueError(f"y of shape {tuple(y.shape)} from x of shape {tuple(x.shape)}")
        self._check_output(y)
        self.shrink(x)
        self.expand(y)

    def shrink(self, x: Tensor) -> None:
        """The first half of a call: while another stream makes y.

        Raises:
            ValueError: as for a call.
        """
        self._check_input(x)
        if x.shape[0]:
            choice = choose_shape(self.arch, x.shape[0], self.weights.a.dtype)
            self._launch_shrink(x, choice, *self.tiles.of(choice.height))

    def expand(self, y: Tensor) -> None:
        """The second half: after `shrink` of as many rows, and before that of any other layer.

        Raises:
            ValueError: as for a call.
        """
        self._check_output(y)
        if y.shape[0]:
            choice = choose_shape(self.arch, y.shape[0], y.dtype)
            self._launch_expand(y, choice, *self.tiles.of(choice.height))

    def warm_up(self) -> None:
        """Compiles every kernel that a call may need, by launches over no tile."""
        a = self.weights.a
        y = a.new_zeros(1, sum(self.weights.widths))
        embedding = self.weights.kind == "embedding"
        x = a.new_zeros(1, dtype=torch.int32) if embedding else a.new_zeros(1, a.shape[2])
        for most, _ in TABLES[self.arch]:
            choice = choose_shape(self.arch, most, y.dtype)
            count, records = self.tiles.of(choice.height)
            none = torch.zeros_like(count)
            self._launch_shrink(x, choice, none, records)
            self._launch_expand(y, choice, none, records)

    def _launch_shrink(self, x: Tensor, choice: Choice, count: Tensor, records: Tensor) -> None:
        if self.weights.kind == "embedding":
            self._embed(x, choice, count, records)
        else:
            self._shrink(x, choice, count, records)

    def _tiles(self, rows: int, choice: Choice) -> int:
        return self.tiles.bound(min(rows, self.tiles.max_tokens), choice.height)

    def _shrink(self, x: Tensor, choice: Choice, count: Tensor, records: Tensor) -> None:
        a, shape = self.weights.a, choice.shrink
        split = self._split(choice)
        slices, in_features = a.shape[1:]
        shrinking.shrink[(self._tiles(x.shape[0], choice), split, slices)](
            x,
            a,
            self.scratch.planes,
            count,
            records,
            self.tiles.rows,
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

    def _embed(self, ids: Tensor, choice: Choice, count: Tensor, records: Tensor) -> None:
        a = self.weights.a
        shrinking.embed[(self._tiles(ids.shape[0], choice),)](
            ids,
            a,
            self.scratch.planes,
            count,
            records,
            self.tiles.rows,
            a.shape[2],
            self.scratch.pitch,
            ROWS=choice.height,
            RANKS=16,
            num_warps=choice.shrink.warps,
        )

    def _launch_expand(self, y: Tensor, choice: Choice, count: Tensor, records: Tensor) -> None:
        shape = choice.expand
        blocks = sum(-(-width // shape.extent) for width in self.weights.widths)
        expanding.expand[(self._tiles(y.shape[0], choice), blocks)](
            y,
            self.scratch.planes,
            self._slices,
            count,
            records,
            self.tiles.rows,
            y.stride(0),
            self.scratch.plane_size(y.shape[0]),
            self.scratch.pitch,
            SPLIT=self._split(choice),
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

    def _check_input(self, x: Tensor) -> None:
        a = self.weights.a
        embedding = self.weights.kind == "embedding"
        expected: tuple[Any, ...] = (x.shape[0],) if embedding else (x.shape[0], a.shape[2])
        if tuple(x.shape) != expected:
            raise ValueError(f"x is of shape {tuple(x.shape)}, not {expected}")
        if x.stride(-1) != 1:
            raise ValueError("the rows of x must be contiguous")
        if not embedding and x.dtype != a.dtype:
            raise ValueError(f"x is {x.dtype}, the weights {a.dtype}")

    def _check_output(self, y: Tensor) -> None:
        if y.dim() != 2 or y.shape[1] != sum(self.weights.widths):
            raise ValueError(
                f"y is of shape {tuple(y.shape)}, the layer has {sum(self.weights.widths)} columns"
            )
        if y.stride(1) != 1:
            raise ValueError("the rows of y must be contiguous")
        if y.dtype != self.weights.a.dtype:
            raise ValueError(f"y is {y.dtype}, the weights {self.weights.a.dtype}")
