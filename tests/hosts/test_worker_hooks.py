"""A worker without plugins has nothing of the hooks in a step's way; with one it tells of every real step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm.lora.layers import LoRAMapping, LoRAMappingType

from lora_plugin import kernels
from lora_plugin.extensions.loading import load_hooks
from lora_plugin.hooks import Batch
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hosts.vllm import worker
from lora_plugin.kernels import op
from lora_plugin.layout import Kind, Layer, ModelLayout, Slice
from lora_plugin.settings import Settings
from lora_plugin.worker.stager import Job

sys.path.append(str(Path(__file__).parents[1] / "hooks"))

from hook_samples import plugin

NAME = "model.layers.0.mlp.down_proj"
LAYER = Layer(NAME, Kind.LINEAR, (Slice(NAME, 8, 8, (0, 8), (0, 8)),))
CONFIG: Any = SimpleNamespace(
    lora_config=SimpleNamespace(lora_dtype=torch.float32, target_modules=None, max_loras=2, max_lora_rank=16),
    model_config=SimpleNamespace(dtype=torch.float32),
    scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
)


class OneLayer:
    """Stands for the wrapping of a model."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.model = nn.Module()
        self.wrapped = [SimpleNamespace(layer=LAYER, module=SimpleNamespace(), base=nn.Linear(8, 8))]

    def wrap(self) -> ModelLayout:
        return ModelLayout((LAYER,), "float32", 16, {})


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[HookManager], Any]]:
    """A worker's manager with these hooks."""
    monkeypatch.setenv("LORA_PLUGIN_ADAPTER_DIR", str(tmp_path))
    monkeypatch.setattr(worker, "ModelWrapper", OneLayer)

    def build(hooks: HookManager) -> worker.WorkerAdapters:
        monkeypatch.setattr(worker, "process_hooks", lambda: hooks)
        adapters = worker.WorkerAdapters(CONFIG, torch.device("cpu"), {})
        adapters.create_lora_manager(nn.Module(), CONFIG)
        return adapters

    yield build
    kernels.unregister_all()


def rows(*values: int) -> Any:
    return np.array(values, np.int32)


def test_without_plugins_nothing_is_in_the_way(make: Callable[..., Any], tmp_path: Path) -> None:
    adapters = make(load_hooks(Settings(adapter_dir=tmp_path)))
    assert adapters._listeners is None
    compute = op._layers[-1].compute
    assert type(compute).__module__.startswith("lora_plugin.kernels")


def test_a_plugin_hears_of_real_steps_only(make: Callable[..., Any], tmp_path: Path) -> None:
    built: list[Batch] = []

    def batch_built(batch: Batch) -> None:
        built.append(batch)

    def make_linear(layer: Any) -> Any:
        return layer.compute

    adapters = make(HookManager([plugin("ear", batch_built, make_linear)]))
    adapters.set_active_adapters(set(), LoRAMapping((0, 0), (0,), type=LoRAMappingType.LANGUAGE))
    assert built == []
    adapters.set_rows(np.array([0, 0], np.int64), rows(3, 1), rows(1, 1))
    adapters.stage([Job(5, "poet", str(tmp_path / "poet"), "x")], [5])
    adapters.arena.entries = lambda ids: np.where(ids > 0, 0, -1).astype(np.int32)
    adapters.set_rows(np.array([5, 0, 5], np.int64), rows(2, 1, 1), rows(1, 1, 1))
    assert built == [Batch((), (-1, -1), (3, 1)), Batch(("poet",), (0, -1, 0), (2, 1, 1))]
