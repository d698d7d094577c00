"""Random arenas and steps, and what the ops should make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from lora_plugin import kernels
from lora_plugin.kernels import reference
from lora_plugin.kernels.costs import DEFAULT, Costs
from lora_plugin.kernels.layer import AFFINE_ROWS

GARBAGE = 3e4
"""In every arena row that no adapter owns; with it, a product overflows in float16."""
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 1e-2, "atol": 3e-2},
}
STRATEGIES = {
    "default": DEFAULT,
    "one tile": DEFAULT._replace(tile=1e9, wide_tile=1e9, gather=1e9),
    "a tile per run": DEFAULT._replace(tile=0, wide_tile=0, gather=1e9, restore=1e9),
    "gathered": DEFAULT._replace(tile=1e9, wide_tile=1e9, gather=0, restore=1e12, gather_run=1000),
    "never float32": DEFAULT._replace(wide_limit=0),
    "float32": DEFAULT._replace(wide_limit=4e6),
}
WAYS = {"native": ("native", DEFAULT)} | {name: ("torch", costs) for name, costs in STRATEGIES.items()}
"""Every way to compute a step: which kernels, and the costs they go by."""


def extents(ranks: Sequence[int], gap: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """First rows, ranks, and the size of an arena that holds them, each rounded up to 8 rows."""
    sizes = (np.asarray(ranks) + 7) // 8 * 8 + gap
    first_rows = np.cumsum(sizes) - sizes
    return first_rows.astype(np.int32), np.asarray(ranks, dtype=np.int32), int(sizes.sum())


def random_layer(
    first_rows: np.ndarray,
    ranks: np.ndarray,
    rows: int,
    inputs: int,
    widths: Sequence[int],
    dtype: torch.dtype,
    kind: str = "linear",
    affine: np.ndarray | None = None,
) -> kernels.LayerWeights:
    """Adapters whose outputs are of order one, among garbage; those in `affine` need a gap of 8 rows."""
    a = torch.full((rows, len(widths), inputs), GARBAGE)
    bs = [torch.full((rows, width), GARBAGE) for width in widths]
    for first, rank in zip(first_rows.tolist(), ranks.tolist(), strict=True):
        own = slice(first, first + rank)
        scale = 1.0 if kind == "embedding" else inputs**-0.5
        a[own] = torch.randn(rank, len(widths), inputs) * scale
        for b in bs:
            b[own] = torch.randn(rank, b.shape[1]) * rank**-0.5
    for stop in (first_rows + ranks)[[] if affine is None else affine > 0].tolist():
        for b in bs:
            b[stop : stop + AFFINE_ROWS] = torch.randn(AFFINE_ROWS, b.shape[1]) * 0.5
    return kernels.LayerWeights(a.to(dtype), tuple(b.to(dtype) for b in bs), kind)  # type: ignore[arg-type]


@dataclass
class Step:
    """A batch that has been told of its step."""

    batch: kernels.Batch
    rows: list[tuple[int, int] | None]
    affine: set[tuple[int, int]]

    @property
    def base_rows(self) -> list[int]:
        return [row for row, extent in enumerate(self.rows) if extent is None]


def make_step(
    adapters: np.ndarray,
    counts: np.ndarray,
    first_rows: np.ndarray,
    ranks: np.ndarray,
    arena_rows: int,
    dtype: torch.dtype,
    way: tuple[str, Costs] = WAYS["default"],
    affine: np.ndarray | None = None,
) -> Step:
    choice, costs = way
    if choice not in kernels.available("cpu", dtype):
        pytest.skip(
            f"{choice} kernels do not serve {dtype} on this machine: native is for bf16, fp32, and AVX512"
        )
    batch = kernels.Batch(2048, 256, len(ranks), arena_rows, "cpu", dtype, costs, choice)
    step = Step(batch, [], set())
    change_step(step, adapters, counts, first_rows, ranks, affine)
    return step


def change_step(
    step: Step,
    adapters: np.ndarray,
    counts: np.ndarray,
    first_rows: np.ndarray,
    ranks: np.ndarray,
    affine: np.ndarray | None = None,
) -> None:
    step.batch.update(adapters, counts, first_rows, ranks, affine)
    if affine is not None:
        chosen = np.flatnonzero(affine)
        step.affine = {(int(first_rows[i]), int(first_rows[i] + ranks[i])) for i in chosen}
    step.rows = [
        None if adapter < 0 else (int(first_rows[adapter]), int(first_rows[adapter] + ranks[adapter]))
        for adapter, count in zip(adapters, counts, strict=True)
        for _ in range(count)
    ]


def check_apply(step: Step, weights: kernels.LayerWeights, handle: int, padding: int = 2) -> None:
    """Applies to random rows, some of them hostile, and compares with the reference."""
    tokens = len(step.rows)
    x = torch.randn(tokens + padding, weights.in_features).to(step.batch.dtype)
    y = torch.randn(tokens + padding, sum(weights.widths)).to(step.batch.dtype)
    untouched = [*step.base_rows, *range(tokens, tokens + padding)]
    # oneDNN itself lets infinities leak into the row before when `in` is no multiple of 8
    hostile = (torch.inf, torch.nan, 1.0) if weights.in_features % 8 == 0 else (1e4, -1e4, 1.0)
    for i, row in enumerate(untouched):
        x[row] = hostile[i % 3]
        y[row] = (-0.0, -torch.inf, 1.5)[i % 3]
    before = y.clone()
    expected = reference.lora_apply(y, x, weights, step.rows, step.affine)
    torch.ops.lora_plugin.lora_apply(y, x, handle)
    check_result(y, before, expected, untouched)


def check_result(y: Tensor, before: Tensor, expected: Tensor, untouched: list[int]) -> None:
    torch.testing.assert_close(y.double(), expected, **TOLERANCE[y.dtype])
    bits = torch.int32 if y.dtype == torch.float32 else torch.int16
    assert torch.equal(y[untouched].view(bits), before[untouched].view(bits))
