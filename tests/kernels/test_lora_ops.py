"""Both ops against the float64 reference, over shapes that fit no tile, whichever way they are computed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from lora_cases import (
    TOLERANCE,
    WAYS,
    change_step,
    check_apply,
    check_result,
    extents,
    make_step,
    random_layer,
)

from lora_plugin import kernels
from lora_plugin.kernels import reference
from lora_plugin.kernels.costs import Costs

RANKS = (1, 4, 5, 8, 24, 64, 128)
AFFINE = np.array([0, 1, 0, 1, 1, 0, 1])
"""Which of them also scale and shift what they change."""
DTYPES = tuple(TOLERANCE)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    kernels.unregister_all()


def random_step(tokens: int, adapters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Requests of 1 to 20 rows over random adapters and the base model."""
    random = np.random.default_rng(seed)
    counts = []
    while sum(counts) < tokens:
        counts.append(min(int(random.integers(1, 21)), tokens - sum(counts)))
    return random.integers(-1, adapters, len(counts)), np.array(counts, dtype=np.int64)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3, 63, 130])
def test_apply_equals_the_reference(tokens: int, dtype: torch.dtype, way: tuple[str, Costs]) -> None:
    first_rows, ranks, arena_rows = extents(RANKS, gap=8)
    rows = random_step(tokens, len(ranks), tokens)
    step = make_step(*rows, first_rows, ranks, arena_rows, dtype, way, AFFINE)
    for inputs, widths in ((53, (41,)), (56, (67, 13, 29))):
        weights = random_layer(first_rows, ranks, arena_rows, inputs, widths, dtype, affine=AFFINE)
        check_apply(step, weights, kernels.register(weights, step.batch))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_many_adapters_of_all_ranks_one_row_each(way: tuple[str, Costs]) -> None:
    first_rows, ranks, arena_rows = extents((RANKS * 10)[:64])
    adapters = np.random.default_rng(1).permutation(64)
    adapters = np.insert(adapters, [0, 10, 11, 30, 64], -1)
    step = make_step(adapters, np.ones_like(adapters), first_rows, ranks, arena_rows, torch.bfloat16, way)
    weights = random_layer(first_rows, ranks, arena_rows, 96, (160, 32), torch.bfloat16)
    check_apply(step, weights, kernels.register(weights, step.batch))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
def test_embedding_equals_the_reference(
    index: torch.dtype, dtype: torch.dtype, way: tuple[str, Costs]
) -> None:
    first_rows, ranks, arena_rows = extents(RANKS, gap=8)
    step = make_step(*random_step(63, len(ranks), 5), first_rows, ranks, arena_rows, dtype, way, AFFINE)
    weights = random_layer(first_rows, ranks, arena_rows, 211, (37,), dtype, "embedding", AFFINE)
    handle = kernels.register(weights, step.batch)
    ids = torch.randint(211, (66,)).to(index)
    y = torch.randn(66, 37).to(dtype)
    before = y.clone()
    expected = reference.lora_embed(y, ids, weights, step.rows, step.affine)
    torch.ops.lora_plugin.lora_embed(y, ids, handle)
    check_result(y, before, expected, [*step.base_rows, 63, 64, 65])


@pytest.mark.parametrize("way", [WAYS["native"], WAYS["default"]], ids=["native", "torch"])
@pytest.mark.parametrize("rank", [1, 3, 5, 7, 9, 31])
def test_a_row_that_overflows_spoils_no_other(rank: int, way: tuple[str, Costs]) -> None:
    first_rows, ranks, arena_rows = extents((rank,))
    step = make_step(np.array([0]), np.array([130]), first_rows, ranks, arena_rows, torch.bfloat16, way)
    weights = random_layer(first_rows, ranks, arena_rows, 64, (41, 64), torch.bfloat16)
    x, y = torch.randn(130, 64).bfloat16(), torch.zeros(130, 105).bfloat16()
    x[1::2] = torch.inf
    torch.ops.lora_plugin.lora_apply(y, x, kernels.register(weights, step.batch))
    assert y[0::2].isfinite().all()
    assert not y[1::2].isfinite().any()


def test_a_run_too_long_for_the_workspace_is_cut() -> None:
    first_rows, ranks, arena_rows = extents((128,))
    step = make_step(np.array([0]), np.array([2001]), first_rows, ranks, arena_rows, torch.float32)
    assert len(step.batch.plan) == 2
    weights = random_layer(first_rows, ranks, arena_rows, 53, (41, 7), torch.float32)
    check_apply(step, weights, kernels.register(weights, step.batch))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_rows_of_y_may_be_strided(way: tuple[str, Costs]) -> None:
    first_rows, ranks, arena_rows = extents((8, 5))
    adapters = np.array([0, -1, 1, 0, -1, 1])
    step = make_step(adapters, np.ones_like(adapters), first_rows, ranks, arena_rows, torch.bfloat16, way)
    weights = random_layer(first_rows, ranks, arena_rows, 48, (24, 8), torch.bfloat16)
    handle = kernels.register(weights, step.batch)
    whole = torch.randn(6, 80).bfloat16()
    before, x = whole.clone(), torch.randn(6, 96).bfloat16()[:, ::2]
    expected = reference.lora_apply(whole[:, 16:48], x, weights, step.rows)
    torch.ops.lora_plugin.lora_apply(whole[:, 16:48], x, handle)
    torch.testing.assert_close(whole[:, 16:48].double(), expected, **TOLERANCE[torch.bfloat16])
    assert torch.equal(whole[:, :16], before[:, :16])
    assert torch.equal(whole[:, 48:], before[:, 48:])


@pytest.mark.parametrize("way", [WAYS["native"], WAYS["default"]], ids=["native", "torch"])
def test_a_layer_follows_the_batch_and_the_arena(way: tuple[str, Costs]) -> None:
    first_rows, ranks, arena_rows = extents((8, 16, 5))
    adapters, counts = np.array([0, -1, 2]), np.array([2, 1, 3])
    step = make_step(adapters, counts, first_rows, ranks, arena_rows, torch.bfloat16, way)
    weights = random_layer(first_rows, ranks, arena_rows, 64, (32,), torch.bfloat16)
    handle = kernels.register(weights, step.batch)
    check_apply(step, weights, handle)
    weights.a[:8].mul_(-2)  # another adapter at the same place, while the step stays the same
    weights.b[0][:8].mul_(0.5)
    change_step(step, adapters, counts, first_rows, ranks)
    check_apply(step, weights, handle)
    change_step(step, adapters[::-1].copy(), counts, first_rows, ranks)
    check_apply(step, weights, handle)
    change_step(step, np.array([-1, -1, -1]), counts, first_rows, ranks)
    assert step.batch.is_empty
    check_apply(step, weights, handle)


def test_buffers_and_weights_stay_where_they_are() -> None:
    first_rows, ranks, arena_rows = extents((8, 16))
    step = make_step(np.array([0]), np.array([1]), first_rows, ranks, arena_rows, torch.bfloat16)
    weights = random_layer(first_rows, ranks, arena_rows, 64, (32, 8), torch.bfloat16)
    handle = kernels.register(weights, step.batch)
    workspace = step.batch.workspace
    names = ("raw", "shrunk", "x", "y", "wide_a", "wide_b", "wide_x", "wide_y")
    before = [workspace.view(name, 1).data_ptr() for name in names]
    for seed in range(5):
        change_step(step, *random_step(200, 2, seed), first_rows, ranks)
        check_apply(step, weights, handle)
    assert [workspace.view(name, 1).data_ptr() for name in names] == before


@pytest.mark.parametrize("way", [WAYS["native"], WAYS["default"]], ids=["native", "torch"])
def test_what_cannot_be_right_is_refused(way: tuple[str, Costs]) -> None:
    first_rows, ranks, arena_rows = extents((8,))
    step = make_step(np.array([0]), np.array([2]), first_rows, ranks, arena_rows, torch.bfloat16, way)
    weights = random_layer(first_rows, ranks, arena_rows, 16, (16,), torch.bfloat16)
    apply, handle = torch.ops.lora_plugin.lora_apply, kernels.register(weights, step.batch)
    x = torch.randn(2, 16).bfloat16()
    with pytest.raises(ValueError, match="y must be"):
        apply(torch.zeros(2, 17).bfloat16(), x, handle)
    with pytest.raises(ValueError, match="y must be"):
        apply(torch.zeros(2, 16), x, handle)
    with torch.inference_mode(False), pytest.raises(ValueError, match="not trained"):
        apply(torch.zeros(2, 16).bfloat16(), torch.randn(2, 16).bfloat16().requires_grad_(), handle)
    with pytest.raises(ValueError, match="on a batch of"):
        kernels.register(random_layer(first_rows, ranks, arena_rows, 16, (16,), torch.float32), step.batch)


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (torch.zeros(8, 16), (torch.zeros(8, 4),), "linear"),
        (torch.zeros(8, 2, 16), (torch.zeros(8, 4),), "linear"),
        (torch.zeros(8, 16, 1).transpose(1, 2)[::2], (torch.zeros(4, 4),), "linear"),
        (torch.zeros(8, 1, 16), (torch.zeros(7, 4),), "linear"),
        (torch.zeros(8, 1, 16), (torch.zeros(8, 4).half(),), "linear"),
        (torch.zeros(8, 2, 16), (torch.zeros(8, 4),) * 2, "embedding"),
    ],
)
def test_weights_of_a_wrong_form_are_refused(a: torch.Tensor, b: tuple[torch.Tensor, ...], kind: str) -> None:
    with pytest.raises(ValueError):
        kernels.LayerWeights(a, b, kind)  # type: ignore[arg-type]
