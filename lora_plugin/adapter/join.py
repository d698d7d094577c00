"""Several packed adapters as one: their rows one below the other in every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_plugin.adapter.pack import PackedAdapter, PackedLayer
from lora_plugin.errors import AdapterRejected, Code


def join(parts: Sequence[PackedAdapter], *, pin: bool = False) -> PackedAdapter:
    """An adapter that adds what all parts add: x A^T B with A and B of the parts concatenated by rank.

    Args:
        parts: packed for the same layout, with their weights folded into B; at least one.
        pin: whether the slab is page-locked.

    Raises:
        AdapterRejected: FEATURE_UNSUPPORTED, for a part that scales or shifts outputs.
    """
    _refuse_affine(parts)
    by_layer: dict[int, list[PackedLayer]] = {}
    for part in parts:
        for layer in part.layers:
            by_layer.setdefault(layer.layer, []).append(layer)
    nbytes = sum(part.nbytes for part in parts)
    dtype = parts[0].slab.dtype
    slab = torch.empty(nbytes // dtype.itemsize, dtype=dtype, pin_memory=pin)
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
        layers.append(PackedLayer(index, a.shape[0], a, b))
    return PackedAdapter(max(layer.rank for layer in layers), nbytes, tuple(layers), slab)


def _refuse_affine(parts: Sequence[PackedAdapter]) -> None:
    """What DoRA and trained biases make of an output is no sum of what they add."""
    for number, part in enumerate(parts, start=1):
        if part.affine:
            raise AdapterRejected(
                Code.FEATURE_UNSUPPORTED,
                f"part {number} of the composition has DoRA or trained biases, which cannot be composed",
                hint="merge it into the base model, or leave it out",
            )
