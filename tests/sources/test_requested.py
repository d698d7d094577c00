"""A name that nobody serves is fetched once, however many ask; a failure costs a clear answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from catalog_samples import Clock, catalog_of, write_adapter
from hook_samples import plugin

from lora_plugin.errors import AdapterNotFound, AdapterRejected, Code, LoraPluginError, Unavailable
from lora_plugin.hooks import Source
from lora_plugin.hooks.manager import HookManager
from lora_plugin.settings import Settings
from lora_plugin.sources.requested import RequestedAdapters


class Shelf:
    """A source that writes a good adapter, unless told otherwise."""

    description = "the shelf"

    def __init__(self, fetch: Callable[[Path], None] = write_adapter) -> None:
        self.fetches = 0
        self._fetch = fetch

    def fetch(self, destination: Path) -> None:
        self.fetches += 1
        self._fetch(destination)


class Bench:
    """A catalog over an empty directory, and plugins that know some names."""

    def __init__(
        self,
        root: Path,
        known: dict[str, Source | Exception],
        timeout: float = 5.0,
        settle: float = 0.01,
    ) -> None:
        self.asked: list[str] = []
        self.known = known
        self.clock = Clock()
        settings = Settings(adapter_dir=root, settle_seconds=settle, load_timeout_seconds=timeout)
        self.catalog = catalog_of(settings, "base")

        def resolve_source(name: str) -> Source | None:
            self.asked.append(name)
            found = self.known.get(name)
            if isinstance(found, Exception):
                raise found
            return found

        hooks = HookManager([plugin("shelves", resolve_source)])
        self.requested = RequestedAdapters(self.catalog, hooks, settings, self.clock)


async def test_it_is_fetched_and_listed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"poet": Shelf()})
    await bench.requested.ensure("poet")
    assert bench.catalog.find("poet").rank == 4
    await bench.requested.ensure("poet")
    assert bench.asked == ["poet"]


async def test_many_who_wait_cause_one_fetch(tmp_path: Path) -> None:
    gate = threading.Event()

    def slowly(folder: Path) -> None:
        gate.wait(5)
        write_adapter(folder)

    shelf = Shelf(slowly)
    bench = Bench(tmp_path, {"poet": shelf})
    waiting = [asyncio.create_task(bench.requested.ensure("poet")) for _ in range(20)]
    await asyncio.sleep(0.05)
    waiting[0].cancel()
    gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError, *[type(None)] * 19]
    assert shelf.fetches == 1


async def test_who_comes_while_the_folder_settles_waits_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"poet": Shelf()}, settle=0.3)
    first = asyncio.create_task(bench.requested.ensure("poet"))
    while bench.catalog.get("poet") is None:
        await asyncio.sleep(0.01)
    await bench.requested.ensure("poet")
    assert bench.catalog.find("poet")
    await first


async def test_those_who_wait_too_long_are_told_and_the_fetch_goes_on(tmp_path: Path) -> None:
    gate = threading.Event()

    def slowly(folder: Path) -> None:
        gate.wait(5)
        write_adapter(folder)

    shelf = Shelf(slowly)
    bench = Bench(tmp_path, {"poet": shelf}, timeout=0.05)
    with pytest.raises(Unavailable) as raised:
        await bench.requested.ensure("poet")
    assert raised.value.code is Code.NOT_READY
    gate.set()
    while bench.catalog.get("poet") is None:
        await asyncio.sleep(0.01)
    await bench.requested.ensure("poet")
    assert shelf.fetches == 1


def _broken(folder: Path) -> None:
    raise ConnectionError("token=secret")


def _exits(folder: Path) -> None:
    raise SystemExit(3)


def _is_cancelled(folder: Path) -> None:
    raise asyncio.CancelledError


def _nothing(folder: Path) -> None:
    return None


@pytest.mark.parametrize(
    ("source", "error", "code"),
    [
        (None, AdapterNotFound, Code.NOT_FOUND),
        (ValueError("token=secret"), Unavailable, Code.FETCH_FAILED),
        (Shelf(_broken), Unavailable, Code.FETCH_FAILED),
        (Shelf(_exits), Unavailable, Code.FETCH_FAILED),
        (Shelf(_is_cancelled), Unavailable, Code.FETCH_FAILED),
        (Shelf(_nothing), Unavailable, Code.FETCH_FAILED),
    ],
)
async def test_a_failure_has_its_code_and_is_remembered_for_a_while(
    tmp_path: Path, source: Source | Exception | None, error: type[LoraPluginError], code: Code
) -> None:
    bench = Bench(tmp_path, {} if source is None else {"poet": source})
    for _ in range(3):
        with pytest.raises(error) as raised:
            await bench.requested.ensure("poet")
        assert raised.value.code is code
        assert "secret" not in str(raised.value)
    assert bench.asked == ["poet"]
    bench.known["poet"] = Shelf()
    bench.clock.now += 6
    await bench.requested.ensure("poet")
    assert bench.catalog.find("poet")


async def test_an_adapter_that_does_not_fit_is_rejected_with_its_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"wide": Shelf(lambda folder: write_adapter(folder, rank=64))})
    await bench.requested.ensure("wide")
    with pytest.raises(AdapterRejected) as raised:
        bench.catalog.find("wide")
    assert raised.value.code is Code.RANK_TOO_LARGE


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "text", "x" * 101, "a b"])
async def test_only_names_of_adapters_are_asked_about(tmp_path: Path, name: str) -> None:
    bench = Bench(tmp_path, {})
    with pytest.raises(AdapterNotFound):
        await bench.requested.ensure(name)
    assert bench.asked == []


async def test_without_plugins_nothing_is_looked_up(tmp_path: Path) -> None:
    settings = Settings(adapter_dir=tmp_path)
    catalog = catalog_of(settings)
    await RequestedAdapters(catalog, HookManager(), settings).ensure("poet")
