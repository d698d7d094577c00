"""The ops a model calls, opaque to `torch.compile`: y changes in place, a handle names layer and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lora_plugin.kernels.batch import Batch
from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.native.layer import NativeLayer
from lora_plugin.kernels.plan import Tile
from lora_plugin.kernels.product import Product

Compute = Callable[[Tensor, Tensor], None]
"""Adds the adapters' share to y, from x or ids."""


@runtime_checkable
class Halves(Protocol):
    """A layer whose first half can run while the base output is in the making."""

    def __call__(self, y: Tensor, x: Tensor, /) -> None: ...

    def shrink(self, x: Tensor) -> None: ...

    def expand(self, y: Tensor) -> None: ...


class _Planned:
    """A layer computed by torch: the steps of the plan it last saw."""

    __slots__ = ("batch", "plan", "steps", "weights")

    def __init__(self, weights: LayerWeights, batch: Batch) -> None:
        self.weights, self.batch = weights, batch
        self.plan: tuple[Tile, ...] = ()
        self.steps: list[tuple[Product, Tensor, tuple[Tensor, ...]]] = []

    def __call__(self, y: Tensor, x: Tensor) -> None:
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
        self.steps += [(adjust, *self.weights.span(*adjust.span)) for adjust in self.batch.adjustments]
        self.plan = plan


def _prepared(weights: LayerWeights, batch: Batch) -> Compute:
    """The layer as the batch's kernels compute it, compiled where there is something to compile."""
    if batch.native is not None:
        return NativeLayer(weights, batch.native)
    if batch.tiles is None:
        return _Planned(weights, batch)
    from lora_plugin.kernels.triton.layer import DeviceLayer  # Triton need not be installed

    layer = DeviceLayer(weights, batch.tiles)
    layer.warm_up()
    return layer


class _Registered(NamedTuple):
    batch: Batch
    compute: Compute


_layers: list[_Registered] = []


def register(weights: LayerWeights, batch: Batch, make: Callable[[Compute], Compute] | None = None) -> int:
    """Joins a layer with the batch that its rows come from; returns the handle for the ops.

    Not during a step: it may grow the batch's buffers.

    Args:
        weights: the layer's arena.
        batch: the rows.
        make: what the ops call instead, given what the kernels would do.
    """
    if weights.rows != batch.arena_rows or weights.a.dtype != batch.dtype:
        raise ValueError(
            f"a layer of {weights.rows} {weights.a.dtype} rows on a batch of {batch.arena_rows} {batch.dtype}"
        )
    batch.reserve(weights)
    compute = _prepared(weights, batch)
    _layers.append(_Registered(batch, make(compute) if make else compute))
    return len(_layers) - 1


def unregister_all() -> None:
    """Forgets every layer; handles are given anew from 0."""
    _layers.clear()


def shrink(x: Tensor, handle: int) -> None:
    """What can be computed before y is there, on the present stream; `expand` must follow before another.

    Args:
        x: as for `lora_apply`.
    """
    compute = _layers[handle].compute
    if isinstance(compute, Halves):
        compute.shrink(x)


def expand(y: Tensor, x: Tensor, handle: int) -> None:
    """The rest of `lora_apply` after `shrink` of the same x; all of it for kernels without halves."""
    compute = _layers[handle].compute
    if isinstance(compute, Halves):
        compute.expand(y)
    else:
        torch.ops.lora_plugin.lora_apply(y, x, handle)


def _apply(y: Tensor, x: Tensor, handle: int) -> None:
    batch, compute = _layers[handle]
    if batch.num_adapters:
        compute(y, x)


def _apply_on_device(y: Tensor, x: Tensor, handle: int) -> None:
    """Launches also for an empty step: a captured graph must not depend on the step."""
    _layers[handle].compute(y, x)


def _nothing(y: Tensor, x: Tensor, handle: int) -> None:
    return None


_untyped: Any = torch.library
_library = _untyped.Library("lora_plugin", "DEF")
for _name, _input in (("lora_apply", "x"), ("lora_embed", "ids")):
    _library.define(f"{_name}(Tensor(a!) y, Tensor {_input}, int handle) -> ()")
    _library.impl(_name, _apply, "CPU")
    _library.impl(_name, _apply_on_device, "CUDA")
    _library.impl(_name, _nothing, "Meta")
