"""The gain and the shift of each output, as PEFT computes DoRA and trained biases.

DoRA (https://arxiv.org/abs/2402.09353) makes of a weight W the rows m (W + B A) / |W + B A|, B with its
scale: the output without its bias is multiplied by 1 + gain = m / |W + B A|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_plugin.adapter.base_model import BaseLayer, BaseModel, Task
from lora_plugin.adapter.pack import PackedAdapter, PackedLayer, check_finite
from lora_plugin.adapter.plan import LayerPlan, OutputPlan, Plan
from lora_plugin.layout import Layer, ModelLayout, Slice

Vectors = dict[str, Tensor]


def finish_outputs(
    packed: PackedAdapter, plan: Plan, vectors: Vectors, layout: ModelLayout, base: BaseModel
) -> None:
    """Fill the `outputs` of a packed adapter whose A and B are in place.

    Args:
        packed: the adapter.
        plan: what it was packed by.
        vectors: its vectors over outputs by name, float32.
        layout: the model.
        base: its weights.

    Raises:
        AdapterRejected: NOT_FINITE, or FEATURE_UNSUPPORTED for a weight whose norms cannot be had.
    """
    layers = [pair for pair in zip(plan.layers, packed.layers, strict=True) if pair[0].outputs]
    normed = [layer for planned, layer in layers if _has_magnitude(planned)]
    tasks = [squared_norms(base.layers[layer.layer], layer) for layer in normed]
    norms = dict(zip((layer.layer for layer in normed), base.run(tasks), strict=True)) if tasks else {}
    for planned, layer in layers:
        of_layer = norms.get(layer.layer)
        _fill(planned, layer, of_layer, vectors, layout.layers[layer.layer], base.layers[layer.layer])


def squared_norms(base: BaseLayer, packed: PackedLayer) -> Task:
    """|W + B A|^2 by output, float32 [outputs]; W is seen only through the products that the layer makes.

    |W + B A|^2 = |W|^2 + 2 (W A^T) . B + (B A A^T) . B, row by row.
    """
    norms = (yield from base.squared_norms()).clone()
    products = (yield from base.products(packed.a.flatten(0, 1))).view(*packed.a.shape[:2], -1)
    first = 0
    for index, b in enumerate(packed.b):
        columns = slice(first, first + b.shape[1])
        crossed = products[:, index, columns]
        wide_a, wide_b = packed.a[:, index].to(crossed.device).float(), b.to(crossed.device).float()
        norms[columns] += ((2 * crossed + (wide_a @ wide_a.T) @ wide_b) * wide_b).sum(0)
        first += b.shape[1]
    return norms


def _has_magnitude(planned: LayerPlan) -> bool:
    return any(part is not None and part.magnitude is not None for part in planned.outputs)


def _fill(
    planned: LayerPlan,
    packed: PackedLayer,
    norms: Tensor | None,
    vectors: Vectors,
    layer: Layer,
    base: BaseLayer,
) -> None:
    first = 0
    for part, plan, into in zip(layer.slices, planned.outputs, packed.outputs, strict=True):
        columns = slice(first, first + part.local_out)
        first += part.local_out
        if plan is None:
            continue
        gain = torch.zeros(part.local_out)
        if plan.magnitude is not None and norms is not None:
            gain = _local(vectors[plan.magnitude.name], part, plan) / norms[columns].sqrt() - 1
        bias = torch.zeros(part.local_out) if base.bias is None else base.bias[columns]
        shift = _shift(gain, bias, base.adds_bias, vectors, part, plan)
        exact = torch.stack([gain, shift])
        into.copy_(exact)
        for tensor in plan.vectors:
            check_finite(tensor, exact, into)


def _shift(
    gain: Tensor, bias: Tensor, added: bool, vectors: Vectors, part: Slice, plan: OutputPlan
) -> Tensor:
    """What is to be added; a bias that the output holds must neither be scaled nor stay if it was trained."""
    if part.in_shard[0]:
        # A sum over ranks: the first one's part has the bias.
        return torch.zeros_like(gain)
    shift = -gain * bias if added else torch.zeros_like(gain)
    if plan.bias is not None:
        shift += _local(vectors[plan.bias.name], part, plan) - bias
    if plan.lora_bias is not None:
        shift += plan.scale * _local(vectors[plan.lora_bias.name], part, plan)
    return shift


def _local(vector: Tensor, part: Slice, plan: OutputPlan) -> Tensor:
    """This rank's part of a slice's part of a vector."""
    start = plan.rows[0]
    return vector[start + part.out_shard[0] : start + part.out_shard[1]]
