"""The packed adapter: one slab of host memory in the order of the layers, the scale folded into B."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from lora_plugin.adapter.checkpoint import TensorInfo
from lora_plugin.adapter.document import show
from lora_plugin.adapter.plan import LayerPlan, Plan, SlicePlan
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import AFFINE_ROWS, Layer, ModelLayout

STORED: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LARGEST: Final = 1e4
"""Of a product of A and B, of what is added to an output, of a magnitude, of a token's row: trained ones stay
far below. In an MLP three of them multiply with the model's widths, and stay in the range of float32."""
Zeros = Callable[[int, torch.dtype], Tensor]
"""Makes what an adapter is packed into: 1-D, so many zeros of a dtype."""
SERVED: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class PackedLayer:
    """What one layer of this rank adds: y += (x A^T) B for each slice.

    Attributes:
        layer: index in `ModelLayout.layers`.
        rank: rows; slices of a lower rank are padded with zeros.
        a: [rank, slices, local_in], in the serving dtype.
        b: for each slice [rank, local_out], transposed to PEFT's and times the scale.
        outputs: for each slice [2, local_out], its gain and its shift, see `OutputPlan`; empty when the layer
            has none.
    """

    layer: int
    rank: int
    a: Tensor
    b: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()

    @property
    def adds(self) -> bool:
        """Whether B or `outputs` has anything but zeros; of most, one row tells."""
        return any(bool(part[:1].any()) or bool(part.any()) for part in (*self.b, *self.outputs))


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter ready to be copied to the device: nothing about its content can fail any more.

    Attributes:
        rank: the highest rank of any layer.
        nbytes: the size of `slab`.
        layers: the targeted layers in the layout's order.
        slab: 1-D, contiguous, in the serving dtype; every `a`, `b` and `outputs` is a view of it, in the
            order a, b[0], b[1], ..., outputs[0], ... of each layer, without gaps.
        affine: whether any layer has `outputs`.
        relative: whether it was made of the base model's weights, too, and fits only these.
    """

    rank: int
    nbytes: int
    layers: tuple[PackedLayer, ...]
    slab: Tensor
    affine: bool = False
    relative: bool = False

    @property
    def rows(self) -> int:
        """Arena rows in every layer."""
        return self.rank + AFFINE_ROWS * self.affine

    @property
    def parts(self) -> list[tuple[int, int, bool]]:
        """What `views` makes the layers of."""
        return [(layer.layer, layer.rank, bool(layer.outputs)) for layer in self.layers]


class Packer:
    """Fills a slab tensor by tensor, in whatever order they are read.

    Attributes:
        adapter: what is filled; its `outputs` are left to `finish_outputs`, its tokens to `finish_tokens`.
        vectors: what those two need by name, float32: vectors over outputs, rows of tokens.
    """

    def __init__(self, plan: Plan, layout: ModelLayout, zeros: Zeros | None = None) -> None:
        dtype = SERVED[layout.dtype]
        size = plan.nbytes // dtype.itemsize
        slab = torch.zeros(size, dtype=dtype) if zeros is None else zeros(size, dtype)
        parts = ((layer.layer, layer.rank, bool(layer.outputs)) for layer in plan.layers)
        layers = views(parts, layout, slab)
        self.adapter = PackedAdapter(plan.rank, plan.nbytes, layers, slab, plan.affine, plan.relative)
        self.vectors: dict[str, Tensor] = {}
        self._uses: dict[str, list[_Use]] = {}
        self._largest: dict[str, float] = {}
        outputs = (part for layer in plan.layers for part in layer.outputs if part is not None)
        self._vector_names = {vector.name for part in outputs for vector in part.vectors}
        self._vector_names |= {layer.tokens.values.name for layer in plan.layers if layer.tokens}
        for planned, packed in zip(plan.layers, self.adapter.layers, strict=True):
            self._plan_layer(planned, packed, layout.layers[planned.layer])

    def wants(self, tensor: TensorInfo) -> bool:
        """Whether the tensor is part of the packed adapter."""
        return tensor.name in self._uses or tensor.name in self._vector_names

    def add(self, info: TensorInfo, raw: Tensor) -> None:
        """Cast the tensor once and put this rank's parts of it in place.

        Args:
            info: a tensor that is wanted.
            raw: its bytes, uint8 [nbytes].

        Raises:
            AdapterRejected: NOT_FINITE, for NaN or infinity before or after the cast.
        """
        stored = raw.view(STORED[info.dtype]).view(info.shape)
        if info.name in self._vector_names:
            self.vectors[info.name] = stored.float()
            self._largest[info.name] = check_finite(info, stored, self.vectors[info.name])
            return
        for scale, uses in _by_scale(self._uses[info.name]).items():
            scaled = stored if scale == 1 else stored.float() * scale
            served = scaled.to(self.adapter.slab.dtype)
            largest = check_finite(info, stored, served)
            self._largest[info.name] = max(self._largest.get(info.name, 0.0), largest)
            for use in uses:
                part = served[use.rows[0] : use.rows[1], use.columns[0] : use.columns[1]]
                part = part.T if use.transpose else part
                # A shard of a padded vocabulary reaches beyond the tensor; the rest stays zero.
                use.into[: part.shape[0], : part.shape[1]].copy_(part)

    def check_magnitudes(self, plan: Plan) -> None:
        """Finite weights of absurd size overflow in the model: the NaN would reach caches that others share.

        Raises:
            AdapterRejected: NOT_FINITE.
        """
        for layer in plan.layers:
            for part in filter(None, layer.slices):
                product = self._largest[part.a.name] * self._largest[part.b.name]
                check_largest(part.b, product, "max |A| * max |B| * scale")
            for output in filter(None, layer.outputs):
                for vector in output.vectors:
                    factor = output.scale if vector is output.lora_bias else 1
                    check_largest(vector, self._largest[vector.name] * abs(factor), "values")
            if layer.tokens is not None:
                rows = self._largest[layer.tokens.values.name] * abs(layer.tokens.scale)
                check_largest(layer.tokens.values, rows, "values")

    def _plan_layer(self, planned: LayerPlan, packed: PackedLayer, layer: Layer) -> None:
        for index, plan in enumerate(planned.slices):
            if plan is None:
                continue
            part = layer.slices[index]
            rows = _shift(part.out_shard, plan)
            a = _Use(packed.a[: plan.rank, index], (0, plan.rank), part.in_shard, 1.0, False)
            b = _Use(packed.b[index][: plan.rank], rows, (0, plan.rank), plan.scale, True)
            self._uses.setdefault(plan.a.name, []).append(a)
            self._uses.setdefault(plan.b.name, []).append(b)


@dataclass(frozen=True, eq=False)
class _Use:
    """A part of a stored tensor that goes into a view of the slab."""

    into: Tensor
    rows: tuple[int, int]
    columns: tuple[int, int]
    scale: float
    transpose: bool


def _shift(shard: tuple[int, int], plan: SlicePlan) -> tuple[int, int]:
    start, stop = plan.b_rows
    return start + shard[0], min(start + shard[1], stop)


def _by_scale(uses: list[_Use]) -> dict[float, list[_Use]]:
    groups: dict[float, list[_Use]] = {}
    for use in uses:
        groups.setdefault(use.scale, []).append(use)
    return groups


def views(
    parts: Iterable[tuple[int, int, bool]], layout: ModelLayout, slab: Tensor
) -> tuple[PackedLayer, ...]:
    """A slab's layers.

    Args:
        parts: of each targeted layer its index in the layout, its rank, and whether it has `outputs`.
        layout: the model.
        slab: as in `PackedAdapter`.
    """
    offset = 0

    def take(*shape: int) -> Tensor:
        nonlocal offset
        size = torch.Size(shape).numel()
        view = slab[offset : offset + size].view(shape)
        offset += size
        return view

    layers = []
    for index, rank, adjusts in parts:
        layer = layout.layers[index]
        a = take(rank, len(layer.slices), layer.local_in)
        b = tuple(take(rank, part.local_out) for part in layer.slices)
        outputs = tuple(take(AFFINE_ROWS, part.local_out) for part in layer.slices if adjusts)
        layers.append(PackedLayer(index, rank, a, b, outputs))
    return tuple(layers)


def moved(packed: PackedAdapter, slab: Tensor, layout: ModelLayout) -> PackedAdapter:
    """The adapter in other memory.

    Args:
        packed: what is copied, and stays as it is.
        slab: where to, of the size and dtype of the adapter's.
        layout: the model.
    """
    slab.copy_(packed.slab)
    return replace(packed, layers=views(packed.parts, layout, slab), slab=slab)


def check_largest(tensor: TensorInfo, largest: float, what: str) -> None:
    """Refuse values of absurd size: NOT_FINITE."""
    if largest > _LARGEST:
        raise AdapterRejected(
            Code.NOT_FINITE,
            f"{show(tensor.name)} would overflow in the model",
            expected=f"{what} up to {_LARGEST:g}",
            found=f"{largest:.3g}",
            hint="the training may have diverged, or lora_alpha is wrong",
        )


def check_finite(info: TensorInfo, stored: Tensor, served: Tensor) -> float:
    """The largest absolute value; NaN and infinity are refused.

    A positive finite factor and a cast keep them, so one look covers before and after; and both show in
    the smallest or the largest element, which takes a fraction of the time of looking at each.
    """
    low, high = (bound.item() for bound in torch.aminmax(served)) if served.numel() else (0.0, 0.0)
    if math.isfinite(low) and math.isfinite(high):
        return max(-low, high)
    if bool(torch.isfinite(stored).all()):
        found = f"values beyond the range of {str(served.dtype).removeprefix('torch.')}"
    else:
        found = "NaN or infinity"
    raise AdapterRejected(
        Code.NOT_FINITE,
        f"{show(info.name)} cannot be served",
        expected="finite numbers",
        found=found,
        hint="the training may have diverged",
    )
