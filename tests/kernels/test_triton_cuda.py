"""The Triton kernels on a GPU, through the op and in a captured graph; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from lora_plugin.kernels import Batch, LayerWeights, reference, register, unregister_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FIRST_ROWS, RANKS = np.array([0, 8, 40, 64]), np.array([8, 24, 4, 64])
Subject = tuple[Batch, LayerWeights, int]


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    torch.manual_seed(0)
    a = torch.randn(128, 3, 1040, device="cuda", dtype=request.param) / 32
    b = tuple(torch.randn(128, width, device="cuda", dtype=request.param) for width in (512, 160, 160))
    batch = Batch(8192, 64, 16, 128, "cuda", request.param)
    weights = LayerWeights(a, b)
    yield batch, weights, register(weights, batch)
    unregister_all()


def _inputs(subject: Subject, rows: int) -> tuple[Tensor, Tensor]:
    _, weights, _ = subject
    return weights.a.new_empty(rows, 832).normal_(), weights.a.new_empty(rows, 1040).normal_()


def _expected(subject: Subject, y: Tensor, x: Tensor) -> Tensor:
    batch, weights, _ = subject
    rows = [
        (int(FIRST_ROWS[a]), int(FIRST_ROWS[a] + RANKS[a])) if a >= 0 else None for a in batch.row_adapters()
    ]
    cpu = LayerWeights(weights.a.cpu(), tuple(b.cpu() for b in weights.b))
    return reference.lora_apply(y.cpu(), x.cpu(), cpu, rows)


def _assert_close(y: Tensor, expected: Tensor) -> None:
    error = (y.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error <= 4 * torch.finfo(y.dtype).eps


def _update(subject: Subject, adapters: list[int], counts: list[int]) -> None:
    subject[0].update(np.array(adapters), np.array(counts), FIRST_ROWS, RANKS)


@pytest.mark.parametrize("rows", [1, 4, 7, 63, 130, 700, 2000, 8192])
def test_the_op_is_right_for_every_cut(subject: Subject, rows: int) -> None:
    adapters, share = [2, -1, 1, 0, 3], rows // 5
    _update(subject, adapters, [rows - 4 * share, *[share] * 4])
    y, x = _inputs(subject, rows)
    expected, again = _expected(subject, y, x), y.clone()
    torch.ops.lora_plugin.lora_apply(y, x, subject[2])
    torch.ops.lora_plugin.lora_apply(again, x, subject[2])
    _assert_close(y, expected)
    assert torch.equal(y, again)


@pytest.mark.parametrize("rows", [40, 300])
def test_a_captured_graph_replays_for_other_steps(subject: Subject, rows: int) -> None:
    y, x = _inputs(subject, rows)
    _update(subject, [-1], [rows])
    torch.ops.lora_plugin.lora_apply(y, x, subject[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.lora_plugin.lora_apply(y, x, subject[2])
    for adapters, counts in (([0, -1, 1], [10, 5, 20]), ([2, 3, 1, 2], [1, 2, 3, 4]), ([-1], [7])):
        _update(subject, adapters, counts)
        expected = _expected(subject, y, x)
        graph.replay()
        _assert_close(y, expected)
