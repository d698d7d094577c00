"""What a request is given is ready, asked about again in time, and kept until its response has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from catalog_samples import Bench, MemoryLink, write_adapter

from lora_plugin.composition import parts_of
from lora_plugin.errors import AdapterNotFound, Code, Unavailable
from lora_plugin.hooks import Part
from lora_plugin.hooks.manager import HookManager
from lora_plugin.readiness.leases import Leases
from lora_plugin.readiness.readiness import Readiness
from lora_plugin.routing.composer import Composer
from lora_plugin.routing.ready_versions import ReadyVersions
from lora_plugin.routing.scope import RequestScope
from lora_plugin.settings import Settings
from lora_plugin.sources.arrivals import Arrivals
from lora_plugin.sources.requested import RequestedAdapters

MIX = (Part("a"), Part("b"))


class Engines(MemoryLink):
    """One that keeps what it is asked to, unless it has lost it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.kept: set[int] = set()
        self.lost = False

    async def lease(self, client: str, adapter_ids: list[int], seconds: float) -> set[int]:
        change = self.kept.update if seconds else self.kept.difference_update
        change(adapter_ids)
        return set() if self.lost else set(adapter_ids)


class House:
    """All that makes versions ready."""

    def __init__(self, root: Path) -> None:
        self.bench = Bench(root)
        for seed, name in enumerate("ab"):
            write_adapter(root / name, seed)
        self.bench.settle()
        settings = Settings(adapter_dir=root, settle_seconds=0.01, prefetch=False)
        catalog, self.engines, self.waits = self.bench.catalog, Engines(), list[float]()
        self.leases = Leases(self.engines)
        self.readiness = Readiness(catalog, self.engines, settings, self.leases.ended)
        self.composer = Composer(
            catalog,
            self.readiness.version,
            self.engines,
            self.leases.ended,
            settle_seconds=0.01,
            max_rank=16,
            timeout=5,
        )
        self.versions = ReadyVersions(
            Arrivals(catalog, settings, ()),
            RequestedAdapters(catalog, HookManager(), settings),
            self.readiness,
            self.composer,
            self.leases,
            self.waits.append,
        )


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr("lora_plugin.readiness.readiness.CONFIRM_SECONDS", 1000.0)
    house = House(tmp_path)
    house.readiness.start()
    yield house
    house.readiness.stop()
    house.composer.stop()
    house.leases.stop()


async def test_a_warm_request_asks_nobody_until_it_is_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await house.versions.select("a", RequestScope())
    asked = len(house.engines.asked)
    assert await house.versions.select("a", RequestScope()) == first
    assert (len(house.engines.asked), len(house.waits)) == (asked, 1)
    monkeypatch.setattr("lora_plugin.readiness.readiness.CONFIRM_SECONDS", -1.0)
    assert await house.versions.select("a", RequestScope()) == first
    assert (len(house.engines.asked), len(house.waits)) == (asked + 1, 2)


async def test_a_name_that_nobody_has(house: House) -> None:
    with pytest.raises(AdapterNotFound):
        await house.versions.select("nobody", RequestScope())


@pytest.mark.parametrize("several", [False, True])
async def test_it_is_kept_until_the_response_has_ended(house: House, several: bool) -> None:
    scope = RequestScope("/v1/completions")
    one = await house.versions.select("a", scope, several=several)
    mix = await house.versions.compose("a+b", MIX, scope, several=several)
    assert len(parts_of(mix.path)) == 2
    ids = {one.id, mix.id}
    assert house.engines.kept == (ids if several else set())
    assert set(house.leases._responses) == ids
    scope.end()
    assert not house.leases._responses
    while house.engines.kept:
        await asyncio.sleep(0)


async def test_outside_of_a_request_nothing_is_kept(house: House) -> None:
    await house.versions.select("a", RequestScope(), several=True)
    assert not house.leases._responses
    assert not house.engines.kept


async def test_what_an_engine_lost_meanwhile_is_not_given(house: House) -> None:
    house.engines.lost = True
    with pytest.raises(Unavailable) as error:
        await house.versions.select("a", RequestScope("/v1/completions"), several=True)
    assert error.value.code is Code.NOT_READY
