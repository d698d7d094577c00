"""A linear layer within the host's op for two streams; on a CPU the host runs its two parts in turn."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_plugin import kernels
from lora_plugin.hosts.vllm.layers import ArenaReplicatedLinear
from lora_plugin.kernels.layer import LayerWeights


class Base(torch.nn.Module):
    """What the wrapper asks of a host layer."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ layer.weight.T + bias)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with torch.inference_mode():
        yield
    kernels.unregister_all()


@pytest.mark.parametrize("shape", [(5, 24), (1, 5, 24)], ids=["rows", "a batch of rows"])
def test_a_layer_in_two_streams(shape: tuple[int, ...]) -> None:
    """Base product, bias and the adapter of rows 1 to 3."""
    torch.manual_seed(0)
    weight, bias = torch.randn(16, 24), torch.randn(16)
    weights = LayerWeights(torch.randn(8, 1, 24), (torch.randn(8, 16),))
    batch = kernels.Batch(8, 4, 2, 8, "cpu", torch.float32)
    module = ArenaReplicatedLinear.__new__(ArenaReplicatedLinear)
    torch.nn.Module.__init__(module)
    module.base_layer = Base(weight)
    module._events, module._lora_stream = (None, None), None
    module.handle = kernels.register(weights, batch)
    batch.update(np.array([-1, 0, -1]), np.array([1, 3, 1]), np.array([2]), np.array([4]))

    x = torch.randn(shape)
    output = module._apply_async_impl(x, bias)

    rows = x.double().reshape(5, 24)
    expected = rows @ weight.double().T + bias
    expected[1:4] += rows[1:4] @ weights.a[2:6, 0].double().T @ weights.b[0][2:6].double()
    torch.testing.assert_close(output.double().reshape(5, 16), expected, atol=1e-5, rtol=1e-5)
    assert output.shape == (*shape[:-1], 16)
