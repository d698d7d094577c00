"""Which rows of a step use which adapter."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from lora_plugin.kernels.affine import Adjustment, adjustments
from lora_plugin.kernels.choice import choose
from lora_plugin.kernels.costs import DEFAULT, Costs
from lora_plugin.kernels.layer import AFFINE_ROWS, LayerWeights, Shape
from lora_plugin.kernels.native.step import NativeStep
from lora_plugin.kernels.plan import Planner, Tile
from lora_plugin.kernels.product import Product, make_product
from lora_plugin.kernels.runs import IntArray, find_runs, sort_by_adapter
from lora_plugin.kernels.triton.tiles import DeviceTiles
from lora_plugin.kernels.workspace import Workspace

CELLS_PER_TOKEN = 64
"""A longest run of this rank is one product; a higher rank is cut into several."""


_NOTHING: tuple[IntArray, ...] = (np.empty(0, dtype=np.int64),) * 5


class Batch:
    """The rows of a step and the plan to compute them; reused for the life of the server.

    Args:
        max_tokens, max_requests, max_adapters: the largest step.
        arena_rows: rows of every layer's arena.
        device, dtype: those of the layers.
        costs: what the plan weighs; the width of the layers is added as they are registered.
        kernels: "auto", "triton", "native" or "torch", see `choose`.
        max_rank: the highest rank of any adapter; bounds the memory of the Triton kernels.

    Attributes:
        kernels: which of them was chosen; it has one of the following.
        plans: how often a step looked different from the one before.
        plan, adjustments: what torch computes; otherwise empty.
        tiles: what the Triton kernels read; otherwise None.
        native: what the native kernel reads; otherwise None.
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        max_adapters: int,
        arena_rows: int,
        device: torch.device | str,
        dtype: torch.dtype,
        costs: Costs = DEFAULT,
        kernels: str = "auto",
        max_rank: int | None = None,
    ) -> None:
        self.max_tokens, self.max_requests, self.max_adapters = max_tokens, max_requests, max_adapters
        self.arena_rows, self.device, self.dtype = arena_rows, torch.device(device), dtype
        self.costs = costs
        max_cells = max(arena_rows, max_tokens * min(arena_rows, CELLS_PER_TOKEN))
        self.workspace = Workspace(max_cells, costs, self.device, dtype)
        self.num_rows = 0
        self.num_adapters = 0
        self._widths: list[int] = []
        self.plan: tuple[Tile, ...] = ()
        self.adjustments: tuple[Adjustment, ...] = ()
        self._products: dict[Shape, tuple[Product, ...]] = {}
        self.tiles: DeviceTiles | None = None
        self.native: NativeStep | None = None
        self.kernels = choose(kernels, self.device.type, dtype)
        if self.kernels == "native":
            self.native = NativeStep()
        elif self.kernels == "triton":
            self.tiles = DeviceTiles(max_tokens, max_adapters, max_rank or arena_rows, self.device)
        self.plans = 0
        self._inputs: tuple[IntArray, ...] = _NOTHING

    @property
    def is_empty(self) -> bool:
        """True when no row uses an adapter."""
        return not self.num_adapters

    def update(
        self,
        adapters: IntArray,
        counts: IntArray,
        first_rows: IntArray,
        ranks: IntArray,
        affine: IntArray | None = None,
    ) -> None:
        """Describes the next step; nearly free when it looks like the last one.

        Args:
            adapters: [requests] index into `first_rows` and `ranks`, or -1 for the base model.
            counts: [requests] consecutive rows of each request, in row order.
            first_rows, ranks: [entries] arena rows [first, first + rank) of each adapter.
            affine: [entries] 1 for an adapter whose gain and shift follow its rows, else 0; None: no such.

        Raises:
            ValueError: the step is larger than the batch, or an adapter lies outside the arena.
        """
        inputs = (adapters, counts, first_rows, ranks, np.zeros_like(ranks) if affine is None else affine)
        if all(map(np.array_equal, self._inputs, inputs)):
            return
        num_rows = self._check(*inputs)
        step = sort_by_adapter(*inputs)
        if self.tiles is not None:
            self.tiles.update(step)
        elif self.native is not None:
            self.native.update(step)
        else:
            self._products = {}
            planner = Planner(self.costs, self.arena_rows, self.workspace.max_cells, self.device)
            runs = find_runs(*inputs)
            self.plan = planner.plan(runs)
            self.adjustments = adjustments(runs)
        self.plans += 1
        self.num_rows, self.num_adapters = num_rows, len(step.records)
        self._inputs = tuple(column.copy() for column in inputs)

    def restore(self) -> None:
        """The device's memory lost its content: an empty step, whatever the last one was."""
        self.num_rows = self.num_adapters = 0
        self.plan, self.adjustments, self._products = (), (), {}
        self._inputs = _NOTHING
        if self.tiles is not None:
            self.tiles.restore()

    def reserve(self, weights: LayerWeights) -> None:
        """Takes a layer into account: its buffers, and its width in the plan's costs."""
        if self.kernels != "torch":
            return
        shape = weights.shape
        self.workspace.reserve(shape)
        if shape.kind == "linear":
            self._widths.append(shape.slices * shape.in_features + sum(shape.widths))
            self.costs = self.costs._replace(width=sum(self._widths) / len(self._widths))

    def products(self, shape: Shape) -> tuple[Product, ...]:
        """The plan's tiles for layers of this shape, which share them."""
        if shape not in self._products:
            limit = self.costs.wide_limit
            self._products[shape] = tuple(
                make_product(shape, tile, self.workspace, limit) for tile in self.plan
            )
        return self._products[shape]

    def row_adapters(self) -> NDArray[np.int32]:
        """[num_rows] the adapter of each row, -1 for the base model."""
        adapters, counts, *_ = self._inputs
        return np.repeat(adapters.astype(np.int32), counts)

    def _check(
        self,
        adapters: IntArray,
        counts: IntArray,
        first_rows: IntArray,
        ranks: IntArray,
        affine: IntArray,
    ) -> int:
        """The rows of the step."""
        if len(adapters) != len(counts) or len(adapters) > self.max_requests:
            raise ValueError(
                f"{len(adapters)} requests with {len(counts)} counts, at most {self.max_requests}"
            )
        num_rows = int(counts.sum())
        if num_rows > self.max_tokens or counts.min(initial=0) < 0:
            raise ValueError(f"{num_rows} rows, at most {self.max_tokens}")
        if not len(first_rows) == len(ranks) == len(affine) or (
            len(adapters) and not -1 <= adapters.min() <= adapters.max() < len(ranks)
        ):
            raise ValueError("an adapter is not in the table")
        if len(ranks) and not (
            ranks.min() >= 0 <= first_rows.min()
            and (first_rows + ranks + AFFINE_ROWS * affine).max() <= self.arena_rows
        ):
            raise ValueError(f"an adapter lies outside the {self.arena_rows} rows of the arena")
        return num_rows
