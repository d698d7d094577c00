"""The watcher with real threads and files; waits are bounded, nothing is timed."""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from catalog_samples import CONFIG, WEIGHTS, catalog_of, config_bytes, weight_bytes, write_adapter

import lora_plugin.directory.folders as folders
from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.watcher import Watcher
from lora_plugin.settings import Settings

Start = Callable[..., tuple[Catalog, Watcher]]
NEVER = 1000.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    watchers: list[Watcher] = []

    def begin(root: Path | None = None, **changes: Any) -> tuple[Catalog, Watcher]:
        root = root or tmp_path / "adapters"
        values = {"adapter_dir": root, "settle_seconds": 0.05, "rescan_seconds": NEVER, **changes}
        settings = Settings(**values)
        catalog = catalog_of(settings)
        watchers.append(Watcher(catalog, settings))
        watchers[-1].start()
        return catalog, watchers[-1]

    yield begin
    for watcher in watchers:
        watcher.stop()
        watcher.stop()


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def listed(catalog: Catalog) -> list[str]:
    return [adapter.name for adapter in catalog.listed()]


def test_what_is_there_is_listed_before_the_start_ends(start: Start, tmp_path: Path) -> None:
    for number in range(100):
        write_adapter(tmp_path / "adapters" / f"a{number:03}", seed=0)
    write_adapter(tmp_path / "adapters" / "bad")
    (tmp_path / "adapters" / "bad" / CONFIG).write_bytes(config_bytes(r=3))
    catalog, watcher = start()
    assert watcher.first_scan(30)
    assert listed(catalog) == [f"a{number:03}" for number in range(100)]
    assert not catalog.pending()
    assert all(adapter.at_start for adapter in catalog.list())


def test_a_slow_first_check_is_waited_for(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only copies in progress are given up after a while, never folders that wait for their check."""
    monkeypatch.setattr("lora_plugin.directory.watcher._SETTLING_SECONDS", 0.01)
    for number in range(30):
        write_adapter(tmp_path / "adapters" / f"a{number}")
    inspect = folders.inspect

    def slow(*args: Any) -> object:
        time.sleep(0.01)
        return inspect(*args)

    monkeypatch.setattr(folders, "inspect", slow)
    catalog, watcher = start(settle_seconds=0.001)
    assert watcher.first_scan(30)
    assert len(listed(catalog)) == 30


def test_a_copy_in_progress_does_not_hold_the_start_up(start: Start, tmp_path: Path) -> None:
    (tmp_path / "adapters" / "partial").mkdir(parents=True)
    write_adapter(tmp_path / "adapters" / "a")
    catalog, watcher = start()
    assert watcher.first_scan(30)
    assert listed(catalog) == ["a"]
    assert catalog.pending() == {"partial"}


@pytest.mark.parametrize("watch", ["auto", "events", "poll"])
def test_changes_are_noticed_without_a_rescan(start: Start, tmp_path: Path, watch: str) -> None:
    catalog, watcher = start(watch=watch)
    assert watcher.first_scan(30)
    root = tmp_path / "adapters"
    (root / "a").mkdir()
    (root / "a" / CONFIG).write_bytes(config_bytes())
    whole = weight_bytes()
    with (root / "a" / WEIGHTS).open("wb") as file:
        for start_at in range(0, len(whole), 100):
            file.write(whole[start_at : start_at + 100])
            file.flush()
            time.sleep(0.005)
    until(lambda: listed(catalog) == ["a"])
    assert not catalog.find("a").at_start
    old = catalog.version_of("a")
    write_adapter(tmp_path / "new", seed=2)
    (root / "a").rename(tmp_path / "old")
    (tmp_path / "new").rename(root / "a")
    until(lambda: listed(catalog) == ["a"] and catalog.version_of("a") != old)
    (root / "a").rename(root / "b")
    until(lambda: listed(catalog) == ["b"])
    shutil.rmtree(root / "b")
    until(lambda: not catalog.list())
    # The first one's folder still exists elsewhere: its end must not end the events.
    shutil.rmtree(tmp_path / "old")
    write_adapter(root / "c")
    until(lambda: listed(catalog) == ["c"])
    rejected = [event for event in catalog.events.since() if event.kind == "rejected"]
    assert rejected == []


def test_reading_makes_no_work(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a file makes an event too; a scan that reacted to its own reading would never end."""
    write_adapter(tmp_path / "adapters" / "a")
    catalog, watcher = start()
    assert watcher.first_scan(30)
    time.sleep(0.3)
    scans: list[object] = []
    scan = catalog.scan

    def noted(names: Any = None) -> float | None:
        scans.append(names)
        return scan(names)

    monkeypatch.setattr(catalog, "scan", noted)
    catalog.version_of("a")
    (tmp_path / "adapters" / "a" / WEIGHTS).read_bytes()
    time.sleep(0.3)
    assert scans == []


def test_the_rescan_catches_what_events_miss(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_plugin.directory.observation.Observation.refresh", lambda self: False)
    monkeypatch.setattr("lora_plugin.directory.watcher._POLL_SECONDS", NEVER)
    catalog, watcher = start(rescan_seconds=0.1)
    assert watcher.first_scan(30)
    write_adapter(tmp_path / "adapters" / "a")
    until(lambda: listed(catalog) == ["a"])


def test_it_polls_where_events_do_not_work(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> object:
        raise OSError(errno.ENOSPC, "inotify watch limit reached")

    monkeypatch.setattr("lora_plugin.directory.observation.Observer", fail)
    with caplog.at_level(logging.WARNING, "lora_plugin"):
        catalog, watcher = start(watch="auto")
        assert watcher.first_scan(30)
        write_adapter(tmp_path / "adapters" / "a")
        until(lambda: listed(catalog) == ["a"])
    # A folder that is found half written may be told of, too.
    assert sum("watch limit" in record.getMessage() for record in caplog.records) == 1


def test_a_moved_folder_and_its_successor_are_deleted(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Left to itself, watchdog 7.1 loses its reader over this."""
    root = tmp_path / "adapters"
    write_adapter(root / "a", seed=1)
    catalog, watcher = start()
    assert watcher.first_scan(30)
    (root / "a").rename(tmp_path / "old")
    write_adapter(root / "a", seed=2)
    old = catalog.events.since()[-1].seq
    until(
        lambda: any(
            event.seq > old and event.kind in ("updated", "listed") for event in catalog.events.since()
        )
    )
    time.sleep(1)
    for round_ in range(2):
        shutil.rmtree(root / "a", ignore_errors=True)
        shutil.rmtree(tmp_path / "old", ignore_errors=True)
        until(lambda: not catalog.list())
        write_adapter(root / f"b{round_}")
        until(lambda name=f"b{round_}": listed(catalog) == [name])  # type: ignore[misc]
        shutil.rmtree(root / f"b{round_}")
    assert "do not work" not in caplog.text


def test_the_directory_is_made(start: Start, tmp_path: Path) -> None:
    catalog, watcher = start(tmp_path / "deep" / "adapters")
    assert watcher.first_scan(30)
    write_adapter(tmp_path / "deep" / "adapters" / "a")
    until(lambda: listed(catalog) == ["a"])


def test_the_directory_comes_later(start: Start, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a folder has to be")
    root = tmp_path / "blocked" / "adapters"
    catalog, watcher = start(root, rescan_seconds=0.1)
    assert watcher.first_scan(30)
    (tmp_path / "blocked").unlink()
    write_adapter(root / "a")
    until(lambda: listed(catalog) == ["a"])


@pytest.mark.parametrize("watch", ["auto", "poll"])
def test_the_directory_goes_and_comes_back(start: Start, tmp_path: Path, watch: str) -> None:
    root = tmp_path / "adapters"
    write_adapter(root / "a")
    catalog, watcher = start(rescan_seconds=0.1, watch=watch)
    assert watcher.first_scan(30)
    root.rename(tmp_path / "away")
    time.sleep(0.4)
    assert listed(catalog) == ["a"]
    root.mkdir()
    until(lambda: not catalog.list())
    write_adapter(root / "b")
    until(lambda: listed(catalog) == ["b"])


def test_a_link_to_the_directory(start: Start, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    catalog, watcher = start(tmp_path / "link")
    assert watcher.first_scan(30)
    write_adapter(tmp_path / "real" / "a")
    until(lambda: listed(catalog) == ["a"])


def test_a_failing_scan_does_not_end_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    catalog, watcher = start(rescan_seconds=0.1)
    assert watcher.first_scan(30)

    def fail(names: object = None) -> float | None:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(catalog, "scan", fail)
        until(lambda: "ZeroDivisionError" in caplog.text)
    write_adapter(tmp_path / "adapters" / "a")
    until(lambda: listed(catalog) == ["a"])
