"""What happens to adapters, as plugins hear of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from catalog_samples import Bench, write_adapter
from hook_samples import plugin

from lora_plugin.extensions.lifecycle import CatalogEvents, DeviceEvents
from lora_plugin.hooks import Adapter
from lora_plugin.hooks.manager import HookManager
from lora_plugin.pool.pool import AdapterPool

EVENTS = ("discovered", "rejected", "ready", "retired", "activated", "evicted")


class Ear:
    """A plugin that hears every event, in the order in which they are told."""

    def __init__(self, fails: bool = False) -> None:
        self.heard: list[tuple[str, Adapter]] = []
        self._fails = fails
        self.hooks = HookManager([plugin("ear", *map(self._hears, EVENTS))])

    def events(self) -> list[tuple[str, str]]:
        return [(event, adapter.name) for event, adapter in self.heard]

    def _hears(self, event: str) -> Callable[..., Any]:
        def hear(adapter: Adapter) -> None:
            self.heard.append((event, adapter))
            if self._fails:
                raise RuntimeError("deaf")

        hear.__name__ = f"adapter_{event}"
        return hear


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    root = tmp_path / "adapters"
    root.mkdir()
    return Bench(root)


@pytest.mark.parametrize("fails", [False, True])
def test_a_folders_life(bench: Bench, fails: bool) -> None:
    ear = Ear(fails)
    bench.catalog.events.subscribe(CatalogEvents(ear.hooks, bench.catalog.get))
    write_adapter(bench.root / "poet")
    write_adapter(bench.root / "wide", rank=64)
    bench.settle()
    old = bench.catalog.version_of("poet").digest
    write_adapter(bench.root / "poet", seed=1, rank=2)
    bench.settle()
    new = bench.catalog.version_of("poet").digest
    bench.catalog.unload("poet")
    shutil.rmtree(bench.root / "poet")
    shutil.rmtree(bench.root / "wide")
    bench.settle()
    assert [event for event in ear.events() if event[1] == "poet"] == [
        ("discovered", "poet"),
        ("ready", "poet"),
        ("ready", "poet"),
        ("retired", "poet"),
        ("retired", "poet"),
    ]
    assert [event for event in ear.events() if event[1] == "wide"] == [
        ("discovered", "wide"),
        ("rejected", "wide"),
        ("retired", "wide"),
    ]
    ready = [adapter for event, adapter in ear.heard if event == "ready"]
    assert [(adapter.version, adapter.rank) for adapter in ready] == [(None, 4), (new, 2)]
    assert new != old
    (rejected,) = [adapter for event, adapter in ear.heard if event == "rejected"]
    assert rejected.reason is not None
    assert "[rank-too-large]" in rejected.reason


def load(pool: AdapterPool, adapter_id: int, name: str) -> None:
    pool.want(adapter_id, name, f"digest-{name}", f"/{name}", 100)
    pool.staged(adapter_id, 8, 100)


def test_rows_given_and_lost() -> None:
    ear, pool = Ear(), AdapterPool(1, 16, 1000)
    events = DeviceEvents(ear.hooks, pool.get)
    for adapter_id, name in enumerate(("a", "b", "c"), start=1):
        load(pool, adapter_id, name)
    for adapter_id in (1, 2):
        pool.begin_step({})
        assert pool.try_admit(adapter_id)
    events.follow(pool.take_orders())
    assert ear.events() == [("activated", "a"), ("activated", "b")]
    pool.begin_step({})
    assert pool.try_admit(3)
    pool.begin_step({})
    pool.evict(2)
    events.follow(pool.take_orders())
    assert ear.events()[2:] == [("evicted", "a"), ("activated", "c"), ("evicted", "b")]
    assert ear.heard[0][1] == Adapter("a", "digest-a")


def test_what_was_retired_before_it_was_told_is_not_told() -> None:
    ear, pool = Ear(), AdapterPool(1, 16, 1000)
    events = DeviceEvents(ear.hooks, pool.get)
    load(pool, 1, "a")
    pool.begin_step({})
    pool.try_admit(1)
    pool.begin_step({})
    pool.retire(1)
    events.follow(pool.take_orders())
    assert ear.heard == []
