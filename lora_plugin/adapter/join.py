"""Several packed adapters as one: their rows one below the other in every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_plugin.adapter.pack import PackedAdapter, PackedLayer
from lora_plugin.errors import AdapterRejected, Code


def join(parts: Sequence[PackedAdapter]) -> PackedAdapter:
    """An adapter that adds what all parts add: x A^T B with A and B of the parts concatenated by rank.

    Args:
        parts: packed for the same layout, with their weights folded into B; at least one. A layer whose
            outputs one of them scales or shifts is in no other, see `check_part`.
    """
    by_layer: dict[int, list[PackedLayer]] = {}
    for part in parts:
        for layer in part.layers:
            by_layer.setdefault(layer.layer, []).append(layer)
    nbytes = sum(part.nbytes for part in parts)
    dtype = parts[0].slab.dtype
    slab = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
    offset = 0

    def stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        nonlocal offset
        rows = sum(tensor.shape[0] for tensor in tensors)
        shape = (rows, *tensors[0].shape[1:])
        size = torch.Size(shape).numel()
        view = slab[offset : offset + size].view(shape)
        offset += size
        return torch.cat(list(tensors), out=view)

    layers = []
    for index, joined in sorted(by_layer.items()):
        a = stack([layer.a for layer in joined])
        b = tuple(stack(slices) for slices in zip(*(layer.b for layer in joined), strict=True))
        outputs = tuple(stack([part]) for part in joined[0].outputs)
        layers.append(PackedLayer(index, a.shape[0], a, b, outputs))
    rank = max(layer.rank for layer in layers)
    affine, relative = any(part.affine for part in parts), any(part.relative for part in parts)
    return PackedAdapter(rank, nbytes, tuple(layers), slab, affine, relative)


def check_part(part: PackedAdapter) -> PackedAdapter:
    """The part, if it can be joined.

    Raises:
        AdapterRejected: FEATURE_UNSUPPORTED: what DoRA and trained biases make of an output is no sum.
    """
    if part.affine:
        raise AdapterRejected(
            Code.FEATURE_UNSUPPORTED,
            "DoRA and trained biases cannot be part of a composition",
            hint="merge it into the base model, or leave it out",
        )
    return part
