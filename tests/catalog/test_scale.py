"""Many adapters: work that grows with their number and no faster, and none of it on the event loop."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from catalog_samples import LAYOUT, Bench, MemoryLink, catalog_of, folders_of, write_adapter

import lora_plugin.operations
from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.observation import Observation
from lora_plugin.directory.watcher import Watcher
from lora_plugin.hooks.manager import HookManager
from lora_plugin.service import Service
from lora_plugin.settings import Settings

MANY = 200
_opened: list[str] = []
_counting = threading.Event()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _counting.is_set() and event in ("open", "os.scandir"):
        _opened.append(f"{event} {arguments[0]}")


sys.addaudithook(_audit)


@contextmanager
def opened() -> Iterator[list[str]]:
    """Files and folders that are opened meanwhile, by any thread."""
    _opened.clear()
    _counting.set()
    try:
        yield _opened
    finally:
        _counting.clear()


def calls(work: Any) -> int:
    """Function calls that `work` makes, those of builtins included."""
    count = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_rescan_opens_no_file_and_hashes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(MANY):
        write_adapter(bench.root / f"a{number}")
    bench.settle()
    for number in range(0, MANY, 2):
        bench.catalog.version_of(f"a{number}")
    monkeypatch.setattr("lora_plugin.adapter.load.verify", lambda *args: pytest.fail("a digest was computed"))
    monkeypatch.setattr(
        "lora_plugin.directory.folders.inspect", lambda *args: pytest.fail("it was inspected")
    )
    with opened() as seen:
        bench.catalog.scan()
    assert [entry for entry in seen if entry.startswith("open")] == []
    # The directory, once for folders and once for references, and each folder once.
    assert len(seen) == MANY + 2
    with opened() as seen:
        bench.catalog.scan(("a7",))
    assert len(seen) == 1


def test_a_restart_reads_headers_only(bench: Bench) -> None:
    for number in range(MANY):
        write_adapter(bench.root / f"a{number}")
    bench.settle()
    with opened() as seen:
        again = bench.another()
        again.scan()
        bench.clock.now += 1
        again.scan()
    assert len(again.listed()) == MANY
    files = [entry for entry in seen if entry.startswith("open")]
    # Config, weights' header and, twice, whether it was fetched; each is told twice (os.open, FileIO).
    assert len(files) <= 8 * MANY


def test_work_grows_with_the_number(tmp_path: Path) -> None:
    work = []
    for count in (50, 200):
        root = tmp_path / f"{count}"
        for number in range(count):
            write_adapter(root / f"a{number}")
        catalog = Catalog(root, folders_of(root), settle_seconds=0)
        work.append((calls(catalog.scan), calls(catalog.scan), calls(catalog.listed)))
        assert len(catalog.listed()) == count
    for few, many in zip(*work, strict=True):
        assert many < 5 * few


def test_folders_moved_in_are_not_each_a_new_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watchdog has to begin anew after a move, which looks at every folder."""
    root = tmp_path / "adapters"
    begun, begin = [], Observation._start

    def count(self: Observation) -> None:
        begun.append(time.monotonic())
        begin(self)

    monkeypatch.setattr(Observation, "_start", count)
    settings = Settings(adapter_dir=root, settle_seconds=0.01, rescan_seconds=3600)
    catalog = catalog_of(settings)
    watcher = Watcher(catalog, settings)
    watcher.start()
    try:
        assert watcher.first_scan(30)
        started = time.monotonic()
        for number in range(60):
            write_adapter(tmp_path / "draft")
            (tmp_path / "draft").rename(root / f"a{number}")
            (root / f"a{number}").rename(root / f"b{number}")
            time.sleep(0.01)
        deadline = time.monotonic() + 30
        while len(catalog.listed()) < 60:
            assert time.monotonic() < deadline, len(catalog.listed())
            time.sleep(0.02)
        assert len(begun) <= 3 + (time.monotonic() - started)
    finally:
        watcher.stop()


async def test_views_are_not_made_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engines(MemoryLink):
        async def snapshots(self) -> list[dict[str, Any]]:
            return [{"adapters": []}]

    threads = set()
    view = lora_plugin.operations.Residents.view

    def recorded(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return view(*args)

    monkeypatch.setattr(lora_plugin.operations.Residents, "view", recorded)
    write_adapter(tmp_path / "a")
    settings = Settings(adapter_dir=tmp_path, admin_port=0, settle_seconds=0.01)
    hooks = HookManager([])
    service = Service(settings, Engines(), LAYOUT, hooks, base_models=("base",), with_admin=False)  # type: ignore[arg-type]
    await service.start()
    try:
        assert [adapter.name for adapter in await service.operations.adapters()] == ["a"]
    finally:
        service.stop()
    assert threads
    assert threading.current_thread() not in threads
