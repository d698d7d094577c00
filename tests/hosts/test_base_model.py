"""What staging learns of base weights that it cannot read, and on whose thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from lora_plugin.adapter.base_model import Task
from lora_plugin.adapter.pack import PackedLayer
from lora_plugin.adapter.pack_outputs import squared_norms
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.hosts.vllm import base_layer, base_model
from lora_plugin.hosts.vllm.base_layer import NORMS, HostLayer
from lora_plugin.hosts.vllm.base_model import HostModel, keep_norms
from lora_plugin.hosts.vllm.layers import Wrapped
from lora_plugin.layout import Kind, Layer, Slice

IN, OUT = 150, 48
CPU = torch.device("cpu")
Product = Callable[[Tensor, Tensor], Tensor]


class Hidden(nn.Module):
    """A linear layer whose weight only its product knows."""

    def __init__(self, weight: Tensor, product: Product) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.quant_method = SimpleNamespace(apply=lambda _, x, bias: product(x, weight))


def in_float32(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def with_a_scale_per_row(x: Tensor, weight: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    return (x / scale).round() * scale @ weight.T


def with_a_fixed_scale(x: Tensor, weight: Tensor) -> Tensor:
    return (x / 0.7).round() * 0.7 @ weight.T


def layer_of(base: nn.Module) -> HostLayer:
    part = Slice("m.up_proj", IN, OUT, (0, IN), (0, OUT))
    wrapped: Any = Wrapped(Layer(part.name, Kind.LINEAR, (part,)), nn.Module(), base)  # type: ignore[arg-type]
    return HostLayer(wrapped, torch.float32, CPU)


def finish(task: Task) -> tuple[Tensor, int]:
    """A task's result, and after how many turns."""
    turns = 1
    while True:
        try:
            next(task)
        except StopIteration as done:
            return done.value, turns
        turns += 1


@pytest.mark.parametrize("product", [in_float32, with_a_scale_per_row])
def test_norms_of_a_weight_that_cannot_be_read(product: Product) -> None:
    torch.manual_seed(0)
    weight = torch.randn(OUT, IN)
    a, b = torch.randn(8, 1, IN) / IN**0.5, torch.randn(8, OUT)
    layer, packed = layer_of(Hidden(weight, product)), PackedLayer(0, 8, a, (b,))
    found, turns = finish(squared_norms(layer, packed))
    changed = weight.double() + b.T.double() @ a[:, 0].double()
    torch.testing.assert_close(found.double(), changed.square().sum(1), rtol=1e-5, atol=0)
    # A second adapter does not ask for the norms again.
    again, fewer = finish(squared_norms(layer, packed))
    assert torch.equal(again, found)
    assert (turns, fewer) == (7, 4)


def test_inputs_rounded_by_a_fixed_scale_are_refused_by_name() -> None:
    with pytest.raises(AdapterRejected, match=r"DoRA of m\.up_proj") as caught:
        finish(layer_of(Hidden(torch.randn(OUT, IN), with_a_fixed_scale)).squared_norms())
    assert caught.value.code is Code.FEATURE_UNSUPPORTED


def test_a_plain_weight_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_layer, "_READ_ELEMENTS", 10 * IN)
    base = nn.Linear(IN, OUT).bfloat16()
    base.quant_method = UnquantizedLinearMethod()
    found, turns = finish(layer_of(base).squared_norms())
    torch.testing.assert_close(found.double(), base.weight.double().square().sum(1), rtol=1e-5, atol=0)
    assert turns == 6


@pytest.mark.parametrize("active", [True, False])
def test_norms_are_kept_where_the_plugin_is_on(active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "get_current_vllm_config_or_none", lambda: object())
    monkeypatch.setattr(base_model, "active", lambda config: active)

    def pack(layer: nn.Linear, remove_weight: bool) -> None:
        layer.weight = nn.Parameter(torch.empty(0))

    base = nn.Linear(IN, OUT)
    expected = base.weight.double().square().sum(1)
    keep_norms(pack)(base, remove_weight=True)
    assert hasattr(base, NORMS) == active
    if active:
        found, _ = finish(layer_of(base).squared_norms())
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


def count(turns: int, log: list[int], name: int) -> Task:
    for _ in range(turns):
        log.append(name)
        yield
    return torch.tensor(name)


def fail() -> Task:
    yield
    raise AdapterRejected(Code.NOT_FINITE, "no")


def test_tasks_run_on_the_thread_that_gives_turns() -> None:
    model, log, results = HostModel(nn.Module(), [], torch.float32, CPU), [], []
    thread = threading.Thread(target=lambda: results.extend(model.run([count(3, log, 1), count(1, log, 2)])))
    thread.start()
    turns = 0
    while thread.is_alive():
        before = len(log)
        model.advance(0)
        assert len(log) - before <= 1
        turns += 1
        thread.join(0.001)
    assert log == [1, 1, 1, 2]
    assert [int(result) for result in results] == [1, 2]
    model.advance(1)


def test_a_task_that_fails_ends_alone() -> None:
    model, errors = HostModel(nn.Module(), [], torch.float32, CPU), []

    def run() -> None:
        try:
            model.run([fail(), count(2, [], 1)])
        except AdapterRejected as error:
            errors.append(error.code)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        model.advance(1)
        thread.join(0.001)
    assert errors == [Code.NOT_FINITE]
