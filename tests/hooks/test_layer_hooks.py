"""`make_linear` and `linear_observer` within the op, and the price of nobody implementing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hook_samples import plugin
from lora_cases import extents, make_step, random_layer
from torch import Tensor

from lora_plugin import kernels
from lora_plugin.errors import SettingsError
from lora_plugin.extensions.layers import layer_compute
from lora_plugin.extensions.loading import load_hooks
from lora_plugin.hooks import Compute, LinearLayer
from lora_plugin.hooks.builtin import BUILTIN
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hooks.plugins import Plugin
from lora_plugin.kernels import op
from lora_plugin.layout import Kind, Layer, Slice
from lora_plugin.settings import Settings

FIRST_ROWS, RANKS, ARENA_ROWS = extents((8, 5))
INPUTS, WIDTHS = 16, (8, 4)
LAYER = Layer(
    "model.layers.0.qkv_proj",
    Kind.LINEAR,
    tuple(Slice(f"s{i}", INPUTS, width, (0, INPUTS), (0, width)) for i, width in enumerate(WIDTHS)),
)
OURS = Plugin("kernels", BUILTIN["kernels"], builtin=True)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    kernels.unregister_all()
    torch.compiler.reset()


class Bench:
    """One layer and a step with rows of two adapters and of the base model."""

    def __init__(self, hooks: HookManager) -> None:
        step = make_step(
            np.array([0, -1, 1]), np.array([2, 1, 2]), FIRST_ROWS, RANKS, ARENA_ROWS, torch.float32
        )
        self.weights = random_layer(FIRST_ROWS, RANKS, ARENA_ROWS, INPUTS, WIDTHS, torch.float32)
        self.prepared: list[Compute] = []

        def make(compute: Compute) -> Compute:
            self.prepared.append(compute)
            return layer_compute(hooks, LAYER, compute)

        self.handle = kernels.register(self.weights, step.batch, make)
        self.plain = kernels.register(self.weights, step.batch)
        self.x = torch.randn(5, INPUTS)

    def apply(self, handle: int) -> Tensor:
        y = torch.ones(5, sum(WIDTHS))
        with torch.inference_mode():
            torch.ops.lora_plugin.lora_apply(y, self.x, handle)
        return y


def test_without_plugins_the_op_calls_the_kernels_themselves() -> None:
    bench = Bench(HookManager([OURS]))
    assert op._layers[bench.handle].compute is bench.prepared[0]


def doubling(layer: LinearLayer) -> Compute:
    def compute(y: Tensor, x: Tensor) -> None:
        added = torch.zeros_like(y)
        layer.compute(added, x)
        y += 2 * added

    return compute


def make_linear(layer: LinearLayer) -> Compute:
    return doubling(layer)


def test_the_answer_is_what_the_op_calls_compiled_too() -> None:
    bench = Bench(HookManager([plugin("doubling", make_linear), OURS]))
    ours = bench.apply(bench.plain) - 1
    assert ours.abs().max() > 0.1
    torch.testing.assert_close(bench.apply(bench.handle), 1 + 2 * ours)

    def model(x: Tensor) -> Tensor:
        y = torch.ones(len(x), sum(WIDTHS))
        torch.ops.lora_plugin.lora_apply(y, x, bench.handle)
        return y

    with torch.inference_mode():
        compiled = torch.compile(model, fullgraph=True)(bench.x)
    torch.testing.assert_close(compiled, 1 + 2 * ours)


def test_a_layer_is_described_as_it_is_on_this_rank() -> None:
    seen: list[LinearLayer] = []

    def linear_observer(layer: LinearLayer) -> None:
        seen.append(layer)

    bench = Bench(HookManager([plugin("watcher", linear_observer), OURS]))
    assert seen == [LinearLayer(LAYER.name, "linear", INPUTS, WIDTHS, bench.prepared[0])]
    assert op._layers[bench.handle].compute is bench.prepared[0]


@pytest.mark.parametrize("fails", [False, True])
def test_observers_see_the_result_and_change_nothing(fails: bool) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def linear_observer(layer: LinearLayer) -> Compute:
        def observe(y: Tensor, x: Tensor) -> None:
            seen.append((y.clone(), x.clone()))
            if fails:
                raise RuntimeError("blind")

        return observe

    bench = Bench(HookManager([plugin("watcher", linear_observer), OURS]))
    expected = bench.apply(bench.plain)
    for _ in range(3):
        torch.testing.assert_close(bench.apply(bench.handle), expected)
    assert len(seen) == (1 if fails else 3)
    torch.testing.assert_close(seen[0], (expected, bench.x))


def _raise(layer: LinearLayer) -> Compute:
    raise RuntimeError("boom")


def _wrong(layer: LinearLayer) -> Any:
    return "not callable"


@pytest.mark.parametrize("answer", [_raise, _wrong])
def test_a_plugin_that_fails_leaves_the_layer_to_the_next(answer: Callable[..., Any]) -> None:
    answer.__name__ = "make_linear"
    bench = Bench(HookManager([plugin("broken", answer), OURS]))
    assert op._layers[bench.handle].compute is bench.prepared[0]


def test_with_nobody_to_compute_the_start_is_refused(tmp_path: Path) -> None:
    hooks = load_hooks(Settings(adapter_dir=tmp_path, hooks_block="kernels"))
    with pytest.raises(SettingsError, match=r"model\.layers\.0\.qkv_proj.*LORA_PLUGIN_HOOKS_BLOCK"):
        Bench(hooks)


def test_the_builtin_one_is_the_default(tmp_path: Path) -> None:
    make = partial(layer_compute, load_hooks(Settings(adapter_dir=tmp_path)), LAYER)

    def compute(y: Tensor, x: Tensor) -> None: ...

    assert make(compute) is compute
