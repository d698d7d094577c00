"""The ops row by row in float64, for tests: slow, and too simple to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lora_plugin.kernels.layer import LayerWeights


def lora_apply(y: Tensor, x: Tensor, weights: LayerWeights, rows: Sequence[tuple[int, int] | None]) -> Tensor:
    """What `lora_apply` should leave in y: float64 [rows, out].

    Args:
        rows: per row the arena rows [first, first + rank) of its adapter, or None; y may have more rows.
    """
    return _added(y, weights, rows, lambda row, arena, i: weights.a[arena, i].double() @ x[row].double())


def lora_embed(
    y: Tensor, ids: Tensor, weights: LayerWeights, rows: Sequence[tuple[int, int] | None]
) -> Tensor:
    """What `lora_embed` should leave in y; see `lora_apply`."""
    return _added(y, weights, rows, lambda row, arena, i: weights.a[arena, i, ids[row]].double())


def _added(
    y: Tensor,
    weights: LayerWeights,
    rows: Sequence[tuple[int, int] | None],
    shrink: Callable[[int, slice, int], Tensor],
) -> Tensor:
    result = y.double()
    for row, extent in enumerate(rows):
        if extent is not None:
            arena = slice(*extent)
            deltas = [shrink(row, arena, i) @ b[arena].double() for i, b in enumerate(weights.b)]
            result[row] += torch.cat(deltas)
    return result
