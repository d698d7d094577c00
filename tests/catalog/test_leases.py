"""Leases of an API server: what it tells the engines, and when it lets a version go."""

from __future__ import annotations

import asyncio

import pytest

from lora_plugin.readiness import leases as module
from lora_plugin.readiness.leases import LEASE_SECONDS, Leases


class Engines:
    """Remembers what it was told; has lost the versions in `lost`."""

    def __init__(self) -> None:
        self.told: list[tuple[list[int], float]] = []
        self.clients: set[str] = set()
        self.lost: set[int] = set()
        self.fails = False

    async def lease(self, client: str, adapter_ids: list[int], seconds: float) -> set[int]:
        await asyncio.sleep(0)
        if self.fails:
            raise OSError("gone")
        self.clients.add(client)
        self.told.append((adapter_ids, seconds))
        return set(adapter_ids) - self.lost


@pytest.fixture
def engines() -> Engines:
    return Engines()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_version_is_let_go_with_its_last_response(engines: Engines) -> None:
    leases = Leases(engines)
    first, second = leases.take(1), leases.take(1)
    other = leases.take(2)
    waiting = asyncio.create_task(leases.ended(1))
    first()
    first()
    await settle()
    assert not waiting.done()
    second()
    await asyncio.wait_for(waiting, 5)
    await leases.ended(3)
    other()
    assert engines.told == []


async def test_the_engines_keep_it_from_the_first_response_to_the_last(engines: Engines) -> None:
    leases = Leases(engines)
    first, second = await leases.keep(1), await leases.keep(1)
    assert first is not None
    assert second is not None
    first()
    first()
    await settle()
    assert engines.told == [([1], LEASE_SECONDS)] * 2
    second()
    await settle()
    assert engines.told[2:] == [([1], 0)]
    assert len(engines.clients) == 1
    leases.stop()


async def test_what_an_engine_has_lost_is_not_kept(engines: Engines) -> None:
    leases = Leases(engines)
    engines.lost = {1}
    assert await leases.keep(1) is None
    engines.fails = True
    with pytest.raises(OSError):
        await leases.keep(2)
    leases.stop()


async def test_leases_are_renewed_as_long_as_there_are_any(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RENEW_SECONDS", 0)
    leases = Leases(engines)
    ends = [await leases.keep(version) for version in (2, 1)]
    engines.fails = True
    await settle()
    engines.fails = False
    await settle()
    assert ([1, 2], LEASE_SECONDS) in engines.told
    for end in ends:
        assert end is not None
        end()
    await settle()
    told = len(engines.told)
    await settle()
    assert len(engines.told) == told
    leases.stop()
