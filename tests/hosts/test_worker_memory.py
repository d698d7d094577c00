"""How much host memory a worker locks: on a GPU its share of the engine's budget, on a CPU none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_plugin.hosts.vllm import worker
from lora_plugin.layout import ModelLayout


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the blocks that were asked for; the budget is 1000 bytes."""
    sizes: list[int] = []

    def lock(nbytes: int) -> torch.Tensor:
        sizes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setenv("LORA_PLUGIN_ADAPTER_DIR", str(tmp_path))
    monkeypatch.setenv("LORA_PLUGIN_HOST_MEMORY", "1000")
    monkeypatch.setattr(worker, "page_locked", lock)
    monkeypatch.setattr(worker, "PIN_MEMORY", True)
    return sizes


def made(device: str, workers: int) -> object:
    config: Any = SimpleNamespace(
        lora_config=SimpleNamespace(), parallel_config=SimpleNamespace(world_size=workers)
    )
    adapters = worker.WorkerAdapters(config, torch.device(device), {})
    adapters.layout = ModelLayout((), "float32", 16, {})
    return adapters._host_memory(config)


def test_the_workers_of_an_engine_share_its_budget(locked: list[int]) -> None:
    assert made("cuda:0", 1) is not None
    assert made("cuda:0", 3) is not None
    assert locked == [1000, 334]


def test_each_worker_asks_its_own_gpu(locked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[int] = []
    monkeypatch.setattr(worker, "HostMemory", lambda *_, device: devices.append(device))
    for device in ("cuda:0", "cuda:1"):
        made(device, 2)
    assert devices == [0, 1]


def test_a_host_that_cannot_lock_is_not_asked_to(locked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PIN_MEMORY", False)
    # Copies are kept track of all the same.
    assert made("cuda:0", 1) is not None
    assert locked == [0]


def test_on_a_cpu_adapters_stay_where_they_were_packed(locked: list[int]) -> None:
    assert made("cpu", 1) is None
    assert locked == []
