"""A pin is by name, in the engines too: the newest version has it as long as the operator wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from catalog_samples import LAYOUT, MemoryLink, write_adapter

from lora_plugin.errors import Code, Unavailable
from lora_plugin.hooks.manager import HookManager
from lora_plugin.readiness.staging import StageSpec, StageStatus
from lora_plugin.service import Service
from lora_plugin.settings import Settings


class PinLink(MemoryLink):
    """Engines that note which versions are pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.pins: set[int] = set()
        self.full = False
        self.cached: set[int] = set()

    async def stage(self, adapters: list[StageSpec]) -> dict[int, StageStatus]:
        found = await super().stage(adapters)
        self.cached |= {adapter_id for adapter_id, status in found.items() if status.state == "ready"}
        return found

    async def pin(self, adapter_id: int) -> None:
        if adapter_id not in self.cached:
            raise Unavailable(Code.NOT_READY, "not in the host cache")
        self.pins.add(adapter_id)
        if self.full:
            # One of two engines.
            raise Unavailable(Code.POOL_FULL, "no slab would be left")

    async def unpin(self, adapter_id: int) -> None:
        self.pins.discard(adapter_id)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    write_adapter(tmp_path / "a", seed=1)
    settings = Settings(adapter_dir=tmp_path, admin_port=0, settle_seconds=0.01)
    engines: Any = PinLink()
    service = Service(settings, engines, LAYOUT, HookManager([]), base_models=("base",), with_admin=False)
    await service.start()
    yield service
    service.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_unpinned_while_the_newer_version_is_loaded(service: Service, tmp_path: Path) -> None:
    link: Any = service._engines
    await service.operations.pin("a")
    await until(lambda: len(link.pins) == 1)
    link.open.clear()
    write_adapter(tmp_path / "a", seed=2)
    await until(lambda: len(link.started) == 2)
    await service.operations.unpin("a")
    link.open.set()
    newer = await service._readiness.ensure("a")
    await asyncio.sleep(0.05)
    assert newer.id not in link.pins
    await service.operations.pin("a")
    assert newer.id in link.pins


async def test_an_engine_that_fails_at_it_is_not_passed_over_in_silence(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link: Any = service._engines

    async def fail(adapter_id: int) -> None:
        raise RuntimeError("the engine is dead")

    await service.operations.pin("a")
    link.pin = fail
    write_adapter(tmp_path / "a", seed=2)
    await until(lambda: "pin of adapter 'a': the engine is dead" in caplog.text)


async def test_what_the_host_cache_lost_is_loaded_for_its_pin(service: Service) -> None:
    link: Any = service._engines
    version = await service._readiness.ensure("a")
    link.cached.clear()
    await service.operations.pin("a")
    assert link.pins == {version.id}


async def test_a_pin_that_one_of_the_engines_refuses_is_in_none(service: Service) -> None:
    link: Any = service._engines
    link.full = True
    with pytest.raises(Unavailable):
        await service.operations.pin("a")
    assert link.pins == set()
    assert not service.operations._catalog.known("a").pinned
