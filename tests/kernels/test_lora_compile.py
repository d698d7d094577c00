"""The ops under torch.library's checks and torch.compile: opaque, in place, and never bound to a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from lora_cases import WAYS, change_step, extents, make_step, random_layer
from torch import Tensor

from lora_plugin import kernels
from lora_plugin.kernels.costs import Costs

FIRST_ROWS, RANKS, ARENA_ROWS = extents((8, 5))


BOTH = pytest.mark.parametrize("way", [WAYS["native"], WAYS["default"]], ids=["native", "torch"])


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    kernels.unregister_all()
    torch.compiler.reset()


@BOTH
def test_opcheck(way: tuple[str, Costs]) -> None:
    step = make_step(
        np.array([0, -1, 1]), np.array([2, 1, 2]), FIRST_ROWS, RANKS, ARENA_ROWS, torch.float32, way
    )
    linear = random_layer(FIRST_ROWS, RANKS, ARENA_ROWS, 16, (8, 4), torch.float32)
    table = random_layer(FIRST_ROWS, RANKS, ARENA_ROWS, 50, (12,), torch.float32, "embedding")
    y, x, ids = torch.randn(5, 12), torch.randn(5, 16), torch.randint(50, (5,))
    torch.library.opcheck(
        torch.ops.lora_plugin.lora_apply.default, (y, x, kernels.register(linear, step.batch))
    )
    torch.library.opcheck(
        torch.ops.lora_plugin.lora_embed.default, (y, ids, kernels.register(table, step.batch))
    )


@BOTH
def test_compiled_follows_the_step(way: tuple[str, Costs]) -> None:
    step = make_step(np.array([-1]), np.array([6]), FIRST_ROWS, RANKS, ARENA_ROWS, torch.float32, way)
    weights = random_layer(FIRST_ROWS, RANKS, ARENA_ROWS, 16, (8, 4), torch.float32)
    handle, base = kernels.register(weights, step.batch), torch.randn(12, 16)

    def layer(x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, base)
        torch.ops.lora_plugin.lora_apply(y, x, handle)
        return y.sigmoid()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        plain = torch.randn(6, 16)
        torch.testing.assert_close(compiled(plain), torch.nn.functional.linear(plain, base).sigmoid())
        for adapters, counts in (([0, -1, 1], [2, 1, 3]), ([1, 0], [4, 5]), ([-1, 1], [1, 1])):
            change_step(step, np.array(adapters), np.array(counts), FIRST_ROWS, RANKS)
            x = torch.randn(sum(counts) + 1, 16)
            torch.testing.assert_close(compiled(x), layer(x))
            assert not torch.equal(compiled(x), torch.nn.functional.linear(x, base).sigmoid())
