"""The ops row by row in float64, for tests: slow, and too simple to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from lora_plugin.kernels.layer import LayerWeights

Extent = tuple[int, int]


def lora_apply(
    y: Tensor,
    x: Tensor,
    weights: LayerWeights,
    rows: Sequence[Extent | None],
    affine: Container[Extent] = (),
) -> Tensor:
    """What `lora_apply` should leave in y: float64 [rows, out].

    Args:
        rows: per row the arena rows [first, first + rank) of its adapter, or None; y may have more rows.
        affine: those whose gain and shift follow in B.
    """
    return _applied(
        y, weights, rows, affine, lambda row, arena, i: weights.a[arena, i].double() @ x[row].double()
    )


def lora_embed(
    y: Tensor,
    ids: Tensor,
    weights: LayerWeights,
    rows: Sequence[Extent | None],
    affine: Container[Extent] = (),
) -> Tensor:
    """What `lora_embed` should leave in y; see `lora_apply`."""
    return _applied(y, weights, rows, affine, lambda row, arena, i: weights.a[arena, i, ids[row]].double())


def _applied(
    y: Tensor,
    weights: LayerWeights,
    rows: Sequence[Extent | None],
    affine: Container[Extent],
    shrink: Callable[[int, slice, int], Tensor],
) -> Tensor:
    result = y.double()
    for row, extent in enumerate(rows):
        if extent is not None:
            arena = slice(*extent)
            deltas = [shrink(row, arena, i) @ b[arena].double() for i, b in enumerate(weights.b)]
            result[row] += torch.cat(deltas)
            if extent in affine:
                gain, shift = (torch.cat([b[extent[1] + i].double() for b in weights.b]) for i in (0, 1))
                result[row] = result[row] * (1 + gain) + shift
    return result
