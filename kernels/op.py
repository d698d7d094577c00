"""The ops a model calls, opaque to `torch.compile`: y changes in place, a handle names layer and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lora_plugin.kernels.batch import Batch
from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.plan import Tile
from lora_plugin.kernels.product import Product
from torch import Tensor


class _Registered:
    """A layer with its batch, and the steps of the plan it last saw; or its launches."""

    __slots__ = ("batch", "launch", "plan", "steps", "weights")

    def __init__(self, weights: LayerWeights, batch: Batch) -> None:
        self.weights, self.batch = weights, batch
        self.launch = _launches(weights, batch)
        self.plan: tuple[Tile, ...] = ()
        self.steps: list[tuple[Product, Tensor, tuple[Tensor, ...]]] = []

    def run(self, y: Tensor, x: Tensor) -> None:
        plan = self.batch.plan
        if plan is not self.plan:
            self.bind(plan, y, x)
        for product, a, bs in self.steps:
            product(y, x, a, bs)

    def bind(self, plan: tuple[Tile, ...], y: Tensor, x: Tensor) -> None:
        """Once per plan: what calls in the same place have in common is checked here, not in each."""
        width = sum(self.weights.widths)
        if y.dtype != self.batch.dtype or y.shape[1] != width:
            raise ValueError(f"y must be {self.batch.dtype} [rows, {width}], not {y.dtype} {tuple(y.shape)}")
        if y.requires_grad or x.requires_grad:
            raise ValueError("adapters are served, not trained: call this under torch.inference_mode")
        products = self.batch.products(self.weights.shape)
        self.steps = [
            (product, *self.weights.span(*tile.span)) for product, tile in zip(products, plan, strict=True)
        ]
        self.plan = plan


def _launches(weights: LayerWeights, batch: Batch) -> Callable[[Tensor, Tensor], None] | None:
    """The layer's Triton kernels, compiled; None when torch computes."""
    if batch.tiles is None:
        return None
    from lora_plugin.kernels.triton.layer import DeviceLayer  # Triton need not be installed

    layer = DeviceLayer(weights, batch.tiles)
    layer.warm_up()
    return layer


_layers: list[_Registered] = []


def register(weights: LayerWeights, batch: Batch) -> int:
    """Joins a layer with the batch that its rows come from; returns the handle for the ops.

    Not during a step: it may grow the batch's buffers.
    """
    if weights.rows != batch.arena_rows or weights.a.dtype != batch.dtype:
        raise ValueError(
            f"a layer of {weights.rows} {weights.a.dtype} rows on a batch of {batch.arena_rows} {batch.dtype}"
        )
    batch.reserve(weights)
    _layers.append(_Registered(weights, batch))
    return len(_layers) - 1


def unregister_all() -> None:
    """Forgets every layer; handles are given anew from 0."""
    _layers.clear()


def _apply(y: Tensor, x: Tensor, handle: int) -> None:
    layer = _layers[handle]
    if layer.batch.plan:
        layer.run(y, x)


def _apply_on_device(y: Tensor, x: Tensor, handle: int) -> None:
    """Launches also for an empty step: a captured graph must not depend on the step."""
    launch = _layers[handle].launch
    if launch is None:
        _apply(y, x, handle)
    else:
        launch(y, x)


def _nothing(y: Tensor, x: Tensor, handle: int) -> None:
    return None


_untyped: Any = torch.library
_library = _untyped.Library("lora_plugin", "DEF")
for _name, _input in (("lora_apply", "x"), ("lora_embed", "ids")):
    _library.define(f"{_name}(Tensor(a!) y, Tensor {_input}, int handle) -> ()")
    _library.impl(_name, _apply, "CPU")
    _library.impl(_name, _apply_on_device, "CUDA")
    _library.impl(_name, _nothing, "Meta")
