"""From PEFT's files to a layer's output: packed, in the arena, through the kernels, several in one batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_samples import LIMIT, VOCAB, llama_layout
from base_weights import WeightsModel
from peft import PeftModel
from test_adapter_outputs import modules, qwen, trained
from torch import Tensor, nn

from lora_plugin import kernels
from lora_plugin.adapter.load import load
from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.layout import Kind
from lora_plugin.worker.arena import Arena

TRAINED = {
    "plain": {"target_modules": "all-linear", "r": 16},
    "dora": {"use_dora": True, "target_modules": "all-linear", "r": 5},
    "biases": {"bias": "all", "r": 4, "target_modules": ["up_proj"]},
    "vocabulary": {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"], "r": 8},
}
ROWS, GRANULE = 64, 8


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with torch.inference_mode():
        yield
    kernels.unregister_all()


@pytest.fixture(scope="module")
def base() -> nn.Module:
    return qwen()


@pytest.fixture(scope="module")
def models(base: nn.Module) -> dict[str, PeftModel]:
    return {name: trained(base, **config) for name, config in TRAINED.items()}


@pytest.fixture(scope="module")
def packed(
    base: nn.Module, models: dict[str, PeftModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, PackedAdapter]:
    root, layout = tmp_path_factory.mktemp("arena"), llama_layout()
    for name, model in models.items():
        model.save_pretrained(str(root / name))
    weights = WeightsModel(base, layout)
    return {name: load(Path(root), name, layout, None, LIMIT, base=weights) for name in TRAINED}


class Served:
    """An arena with its layers, and one batch."""

    def __init__(self, way: str, base: nn.Module) -> None:
        self.layout = llama_layout()
        self.arena = Arena(self.layout, ROWS, GRANULE, torch.device("cpu"), torch.float32)
        self.batch = kernels.Batch(64, 16, self.arena.max_adapters, ROWS, "cpu", torch.float32, kernels=way)
        self.handles = [kernels.register(weights, self.batch) for weights in self.arena.weights]
        self.base = base

    def check(
        self, rows: list[tuple[str | None, int]], ids: dict[str, int], models: dict[str, PeftModel]
    ) -> None:
        """Every layer's output in a batch of (adapter, rows) is PEFT's, row by row."""
        wanted = np.array([0 if name is None else ids[name] for name, _ in rows], np.int64)
        counts = np.array([count for _, count in rows])
        self.batch.update(self.arena.entries(wanted), counts, *self.arena.tables)
        total = int(counts.sum())
        for layer, handle in zip(self.layout.layers, self.handles, strict=True):
            ids_in = layer.kind is Kind.EMBEDDING
            x = torch.randint(VOCAB, (total,)) if ids_in else torch.randn(total, layer.local_in)
            before = torch.cat([self.base.get_submodule(part.name)(x) for part in layer.slices], 1)
            y = before.clone()
            (torch.ops.lora_plugin.lora_embed if ids_in else torch.ops.lora_plugin.lora_apply)(y, x, handle)
            start = 0
            for name, count in rows:
                own = slice(start, start + count)
                start += count
                if name is None:
                    assert torch.equal(y[own], before[own])
                    continue
                expected = torch.cat([module(x[own]) for module in modules(models[name], layer)], 1)
                close(y[own], expected)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", kernels.available())
def test_mixed_batches_and_reused_rows(
    way: str, base: nn.Module, models: dict[str, PeftModel], packed: dict[str, PackedAdapter]
) -> None:
    served = Served(way, copy.deepcopy(base))
    ids = {name: index for index, name in enumerate(packed, start=1)}
    first_row = 0
    for name, adapter in packed.items():
        served.arena.load(ids[name], adapter, first_row)
        first_row += -(-adapter.rows // GRANULE) * GRANULE
    assert first_row <= ROWS
    mixed = [("plain", 3), (None, 2), ("dora", 1), ("biases", 4), ("vocabulary", 2), ("dora", 2), (None, 1)]
    served.check(mixed, ids, models)
    # Rows that held gains and shifts are another's rank rows now, and the other way round.
    for name in ids:
        served.arena.drop(ids[name])
    served.arena.load(ids["dora"], packed["dora"], 8)
    served.arena.load(ids["plain"], packed["plain"], 16)
    served.arena.load(ids["biases"], packed["biases"], 0)
    served.check([("dora", 2), ("plain", 5), (None, 1), ("biases", 1)], ids, models)
    served.check([("plain", 4)], ids, models)


@pytest.mark.parametrize("way", kernels.available())
def test_after_the_device_lost_its_memory(
    way: str, base: nn.Module, models: dict[str, PeftModel], packed: dict[str, PackedAdapter]
) -> None:
    """Whatever the rows hold then; the ids come back to other rows than they had."""
    served = Served(way, base)
    ids = {name: 100 + i for i, name in enumerate(TRAINED)}
    for name, first_row in zip(TRAINED, (0, 24, 40, 48), strict=True):
        served.arena.load(ids[name], packed[name], first_row)
    everyone: list[tuple[str | None, int]] = [(None, 2), *((name, 3) for name in TRAINED)]
    served.check(everyone, ids, models)
    for weights in served.arena.weights:
        for tensor in (weights.a, *weights.b):
            tensor.fill_(torch.nan)
    served.arena.reset()
    served.batch.restore()
    assert served.batch.is_empty
    for name, first_row in zip(reversed(TRAINED), (0, 16, 24, 40), strict=True):
        served.arena.load(ids[name], packed[name], first_row)
    served.check(everyone, ids, models)
