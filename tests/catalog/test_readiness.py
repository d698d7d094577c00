"""Waiting for versions: one load for all, and every way it can end."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from catalog_samples import NAN, SETTLE, Bench, MemoryLink, write_adapter

from lora_plugin.directory.entry import Version
from lora_plugin.errors import AdapterNotFound, AdapterRejected, Code, Reason, Unavailable
from lora_plugin.readiness.leases import Leases
from lora_plugin.readiness.readiness import Readiness
from lora_plugin.readiness.staging import StageSpec, StageStatus
from lora_plugin.settings import Settings

FULL = Reason(Code.HOST_CACHE_FULL, "the host cache is full of adapters in use")


def settings_of(bench: Bench, **changes: Any) -> Settings:
    values = {"adapter_dir": bench.root, "settle_seconds": 0.01, "load_timeout_seconds": 20, **changes}
    return Settings(**values)


@pytest.fixture
def link() -> MemoryLink:
    return MemoryLink()


@pytest.fixture
async def readiness(bench: Bench, link: MemoryLink) -> AsyncIterator[Readiness]:
    write_adapter(bench.root / "a", seed=1)
    bench.settle()
    made = Readiness(bench.catalog, link, settings_of(bench, prefetch=False))
    made.start()
    yield made
    made.stop()
    made.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def failing(awaitable: Awaitable[object]) -> BaseException:
    try:
        await awaitable
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


async def test_twenty_first_requests_are_one_load(
    bench: Bench, link: MemoryLink, readiness: Readiness
) -> None:
    link.questions = 4
    versions = await asyncio.gather(*(readiness.ensure("a") for _ in range(20)))
    assert len(set(versions)) == 1
    assert len(link.asked) == 4
    spec = readiness.spec(versions[0])
    assert set(link.asked) == {spec}
    assert spec == StageSpec(
        versions[0].id, "a", versions[0].digest, str(bench.root / "a"), versions[0].packed_bytes
    )


async def test_digests_give_way_to_the_event_loop(
    bench: Bench, readiness: Readiness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large file one takes a core for as long as a step takes, or longer."""
    version_of, priorities = bench.catalog.version_of, []

    def noting(name: str) -> Version:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return version_of(name)

    monkeypatch.setattr(bench.catalog, "version_of", noting)
    await readiness.ensure("a")
    (priority,) = priorities
    assert priority > os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_the_engines_are_told_whether_a_request_follows(link: MemoryLink, readiness: Readiness) -> None:
    version = await readiness.ensure("a")
    assert {spec.soon for spec in link.asked} == {False}
    link.asked.clear()
    assert await readiness.confirm("a", soon=True) == version
    assert {spec.soon for spec in link.asked} == {True}
    assert not readiness.spec(version).soon


async def test_a_warm_call_asks_nobody(link: MemoryLink, readiness: Readiness) -> None:
    assert readiness.ready("a") is None
    version = await readiness.ensure("a")
    asked = len(link.asked)
    assert readiness.ready("a") == version
    coroutine = readiness.ensure("a")
    with pytest.raises(StopIteration) as done:
        coroutine.send(None)
    assert done.value.value == version
    assert len(link.asked) == asked
    readiness.forget(version)
    assert readiness.ready("a") is None
    assert await readiness.ensure("a") == version
    assert len(link.asked) > asked


async def test_many_cold_adapters_share_the_questions(
    bench: Bench, link: MemoryLink, readiness: Readiness
) -> None:
    for number in range(30):
        write_adapter(bench.root / f"b{number}", seed=number)
    bench.settle()
    calls, stage = [0], link.stage

    async def counted(adapters: list[StageSpec]) -> dict[int, StageStatus]:
        calls[0] += 1
        return await stage(adapters)

    link.stage = counted  # type: ignore[method-assign]
    link.open.clear()
    waiting = [asyncio.create_task(readiness.ensure(f"b{number}")) for number in range(30)]
    await until(lambda: len(link.started) == 30)
    before, asked = calls[0], len(link.asked)
    await until(lambda: calls[0] >= before + 3)
    assert len(link.asked) - asked >= 3 * 30 - 30
    link.open.set()
    assert len(set(await asyncio.gather(*waiting))) == 30


async def test_a_caller_that_gives_up_harms_nobody(link: MemoryLink, readiness: Readiness) -> None:
    link.open.clear()
    tasks = [asyncio.create_task(readiness.ensure("a")) for _ in range(3)]
    await until(lambda: link.asked)
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    assert tasks[0].cancelled()
    link.open.set()
    assert await tasks[1] == await tasks[2]


async def test_when_all_give_up_nobody_asks_on(link: MemoryLink, readiness: Readiness) -> None:
    link.open.clear()
    tasks = [asyncio.create_task(readiness.ensure("a")) for _ in range(3)]
    await until(lambda: link.asked)
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0.1)
    asked = len(link.asked)
    await asyncio.sleep(0.1)
    assert len(link.asked) == asked
    link.open.set()
    assert (await readiness.ensure("a")).name == "a"


async def test_who_still_waits_when_the_server_stops_is_told(link: MemoryLink, readiness: Readiness) -> None:
    link.open.clear()
    waiting = [asyncio.create_task(failing(readiness.ensure("a"))) for _ in range(3)]
    await until(lambda: link.started)
    readiness.stop()
    for error in await asyncio.gather(*waiting):
        assert isinstance(error, Unavailable)
        assert error.reason == Reason(Code.NOT_READY, "the server is shutting down")


async def test_bad_content_is_rejected_for_all(bench: Bench, link: MemoryLink, readiness: Readiness) -> None:
    link.answer = lambda spec: StageStatus("failed", NAN)
    errors = await asyncio.gather(*(readiness.ensure("a") for _ in range(5)), return_exceptions=True)
    assert {type(error) for error in errors} == {AdapterRejected}
    assert bench.state("a") == "rejected"
    asked = len(link.asked)
    assert isinstance(await failing(readiness.ensure("a")), AdapterRejected)
    assert len(link.asked) == asked
    await until(lambda: link.released == link.started)


async def test_no_room_is_no_rejection(bench: Bench, link: MemoryLink, readiness: Readiness) -> None:
    link.answer = lambda spec: StageStatus("failed", FULL)
    error = await failing(readiness.ensure("a"))
    assert isinstance(error, Unavailable)
    assert error.reason == FULL
    assert bench.state("a") == "listed"
    link.answer = lambda spec: None
    assert (await readiness.ensure("a")).name == "a"


async def test_it_waits_no_longer_than_set_and_says_for_what(
    bench: Bench, link: MemoryLink, readiness: Readiness
) -> None:
    link.answer = lambda spec: StageStatus("waiting", FULL)
    hasty = Readiness(bench.catalog, link, settings_of(bench, load_timeout_seconds=0.05))
    error = await failing(hasty.ensure("a"))
    assert isinstance(error, Unavailable)
    assert error.code is Code.NOT_READY
    hasty.stop()


async def test_unknown_and_unfinished_names(bench: Bench, link: MemoryLink, readiness: Readiness) -> None:
    (bench.root / "partial").mkdir()
    bench.settle()
    assert isinstance(await failing(readiness.ensure("nobody")), AdapterNotFound)
    assert isinstance(await failing(readiness.ensure("partial")), Unavailable)
    assert link.asked == []


async def test_an_update_lets_the_old_version_go(
    bench: Bench, link: MemoryLink, readiness: Readiness
) -> None:
    old = await readiness.ensure("a")
    write_adapter(bench.root / "a", seed=2)
    bench.catalog.scan()
    assert readiness.ready("a") == old
    bench.settle()
    assert readiness.ready("a") is None
    await until(lambda: link.released == [old.id])
    new = await readiness.ensure("a")
    assert new.digest != old.digest
    assert readiness.ready("a") == new
    assert link.released == [old.id]


@pytest.mark.parametrize("end", ["delete", "unload", "reject"])
async def test_what_is_served_no_longer_is_let_go(
    bench: Bench, link: MemoryLink, readiness: Readiness, end: str
) -> None:
    version = await readiness.ensure("a")
    if end == "delete":
        shutil.rmtree(bench.root / "a")
        bench.catalog.scan()
    elif end == "unload":
        bench.catalog.unload("a")
    else:
        bench.catalog.reject("a", version.digest, NAN)
    assert readiness.ready("a") is None
    await until(lambda: link.released == [version.id])
    assert isinstance(await failing(readiness.ensure("a")), AdapterNotFound | AdapterRejected)


async def test_an_update_while_waiting(bench: Bench, link: MemoryLink, readiness: Readiness) -> None:
    link.open.clear()
    tasks = [asyncio.create_task(readiness.ensure("a")) for _ in range(3)]
    await until(lambda: link.asked)
    old = link.asked[0].id
    write_adapter(bench.root / "a", seed=2)
    bench.settle()
    await until(lambda: len(link.started) == 2)
    link.open.set()
    versions = set(await asyncio.gather(*tasks))
    assert {version.id for version in versions} == {link.started[1]}
    assert link.released == [old]


async def test_updated_the_moment_it_is_ready(bench: Bench, link: MemoryLink, readiness: Readiness) -> None:
    old = bench.catalog.version_of("a")

    def update(spec: StageSpec) -> StageStatus:
        if spec.id == old.id:
            write_adapter(bench.root / "a", seed=2)
            bench.settle()
        return StageStatus("ready")

    link.answer = update
    version = await readiness.ensure("a")
    assert version != old
    assert readiness.ready("a") == version
    await until(lambda: link.released == [old.id])


async def test_deleted_while_waiting(bench: Bench, link: MemoryLink, readiness: Readiness) -> None:
    link.open.clear()
    task = asyncio.create_task(readiness.ensure("a"))
    await until(lambda: link.asked)
    shutil.rmtree(bench.root / "a")
    bench.catalog.scan()
    assert isinstance(await failing(task), AdapterNotFound)


async def test_changed_before_the_worker_read_it(
    bench: Bench, link: MemoryLink, readiness: Readiness
) -> None:
    """The worker sees the new files first; the catalog looks again and the request gets the new version."""
    changed = Reason(Code.CHANGED, "the folder holds another version")
    old = bench.catalog.version_of("a")
    write_adapter(bench.root / "a", seed=2)
    link.answer = lambda spec: StageStatus("failed", changed) if spec.id == old.id else None
    scan = bench.catalog.scan

    def scanning(names: Any = None) -> float | None:
        bench.clock.now += SETTLE + 0.001
        return scan(names)

    bench.catalog.scan = scanning  # type: ignore[method-assign]
    assert (await readiness.ensure("a")).digest != old.digest


async def test_a_file_that_stays_unreadable(bench: Bench, link: MemoryLink, readiness: Readiness) -> None:
    gone = Reason(Code.UNREADABLE, "adapter_model.safetensors cannot be read")
    link.answer = lambda spec: StageStatus("failed", gone)
    error = await failing(readiness.ensure("a"))
    assert isinstance(error, Unavailable)
    assert error.reason == gone
    assert len(link.asked) == 2
    assert bench.state("a") == "listed"


async def test_an_engine_that_died(bench: Bench, link: MemoryLink, readiness: Readiness) -> None:
    class EngineDead(Exception):
        pass

    def die(spec: StageSpec) -> StageStatus:
        raise EngineDead

    link.answer = die
    errors = await asyncio.gather(*(readiness.ensure("a") for _ in range(3)), return_exceptions=True)
    assert {type(error) for error in errors} == {EngineDead}
    assert bench.state("a") == "listed"
    link.answer = lambda spec: None
    assert (await readiness.ensure("a")).name == "a"


async def test_prefetch_takes_what_comes_and_leaves_what_was_there(bench: Bench) -> None:
    link = MemoryLink()
    for number in range(3):
        write_adapter(bench.root / f"there{number}")
    readiness = Readiness(bench.catalog, link, settings_of(bench))
    readiness.start()
    bench.settle()
    await asyncio.sleep(0.02)
    assert link.asked == []
    for number in range(3):
        write_adapter(bench.root / f"new{number}")
    bench.settle()
    await until(lambda: all(readiness.ready(f"new{number}") for number in range(3)))
    order = [spec.name for spec in link.asked]
    assert order == [f"new{number}" for number in range(3) for _ in range(link.questions)]
    link.answer = lambda spec: StageStatus("failed", NAN)
    write_adapter(bench.root / "bad")
    write_adapter(bench.root / "there1", seed=5)
    bench.settle()
    await until(lambda: bench.state("bad") == bench.state("there1") == "rejected")
    assert bench.state("there0") == "listed"
    readiness.stop()


async def test_prefetch_makes_nobody_leave(bench: Bench) -> None:
    """In a full host cache an adapter that nobody asked for waits for its first request."""
    link = MemoryLink()
    link.free = 10
    readiness = Readiness(bench.catalog, link, settings_of(bench))
    readiness.start()
    bench.settle()
    write_adapter(bench.root / "a")
    bench.settle()
    await until(lambda: bench.catalog.find("a").version is not None)
    await asyncio.sleep(0.02)
    assert link.asked == []
    assert (await readiness.ensure("a")).name == "a"
    readiness.stop()


async def test_what_responses_use_is_let_go_after_them(bench: Bench) -> None:
    """Unless it is served again by then: its files came back."""
    link, leases = MemoryLink(), Leases(NoEngines())
    readiness = Readiness(bench.catalog, link, settings_of(bench, prefetch=False), leases.ended)
    readiness.start()
    write_adapter(bench.root / "a")
    bench.settle()
    version = await readiness.ensure("a")
    first, second = leases.take(version.id), leases.take(version.id)
    shutil.rmtree(bench.root / "a")
    bench.settle()
    first()
    await asyncio.sleep(0.02)
    assert link.released == []
    write_adapter(bench.root / "a")
    bench.settle()
    assert await readiness.ensure("a") == version
    second()
    await asyncio.sleep(0.02)
    assert link.released == []
    shutil.rmtree(bench.root / "a")
    bench.settle()
    await until(lambda: link.released == [version.id])
    readiness.stop()


class NoEngines:
    async def lease(self, client: str, adapter_ids: list[int], seconds: float) -> set[int]:
        raise AssertionError("one engine request needs no lease there")
