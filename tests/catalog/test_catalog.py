"""Folders come, change and go; the catalog says what is served."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from catalog_samples import (
    CONFIG,
    LAYOUT,
    NAN,
    SETTLE,
    WEIGHTS,
    Bench,
    config_bytes,
    weight_bytes,
    write_adapter,
)

import lora_plugin.adapter.load as reader
import lora_plugin.directory.folders as folders
from lora_plugin.adapter.digest import adapter_id
from lora_plugin.adapter.files import FileStamp
from lora_plugin.adapter.load import load
from lora_plugin.directory.folders import AdapterFolders
from lora_plugin.directory.own_folder import FOLDER
from lora_plugin.errors import AdapterIncomplete, AdapterNotFound, AdapterRejected, Code, Unavailable


def test_listed_once_it_is_whole_and_quiet(bench: Bench) -> None:
    write_adapter(bench.root / "a", rank=4)
    assert bench.catalog.scan() == pytest.approx(SETTLE)
    assert bench.state("a") == "discovered"
    bench.clock.now += SETTLE / 2
    bench.catalog.scan()
    assert bench.state("a") == "discovered"
    bench.clock.now += SETTLE
    assert bench.catalog.scan() is None
    adapter = bench.catalog.find("a")
    assert (adapter.rank, adapter.version, adapter.listed_at) == (4, None, 5.0)
    assert adapter.nbytes == len(config_bytes()) + len(weight_bytes())
    assert bench.kinds("a") == ["discovered", "listed"]


def test_a_new_version_copied_into_the_folder_instead_of_over_it_is_said_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    write_adapter(bench.root / "a", seed=1)
    bench.settle()
    version = bench.catalog.version_of("a")
    with caplog.at_level(logging.WARNING, logger="lora_plugin"):
        write_adapter(bench.root / "a" / "a-v2", seed=2)
        for _ in range(3):
            bench.settle()
    said = "the adapter in its folder 'a-v2' is not served: to update, write its files over these"
    assert [record.getMessage() for record in caplog.records] == [f"adapter 'a': {said}"]
    assert bench.catalog.find("a").warnings == (said,)
    assert bench.catalog.version_of("a") == version
    assert bench.kinds("a") == ["discovered", "listed"]


def test_a_version_is_what_the_stager_will_read(bench: Bench) -> None:
    write_adapter(bench.root / "a", seed=1)
    bench.settle()
    version = bench.catalog.version_of("a")
    assert bench.catalog.find("a").version == version
    assert version.id == adapter_id("a", version.digest)
    assert load(bench.root, "a", LAYOUT, version.digest, 1 << 20).rank == version.rank
    other = bench.another()
    other.scan()
    bench.clock.now += 1
    other.scan()
    assert other.version_of("a") == version


def test_config_first_weights_later(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    folder = bench.root / "a"
    folder.mkdir()
    whole = weight_bytes()
    with caplog.at_level(logging.INFO, "lora_plugin"):
        bench.settle()
        (folder / CONFIG).write_bytes(config_bytes())
        bench.settle()
        for size in range(0, len(whole), 40):
            (folder / WEIGHTS).write_bytes(whole[:size])
            bench.settle()
            assert bench.state("a") == "settling"
        reason = bench.catalog.list()[0].reason
        assert reason is not None
        assert reason.code is Code.INCOMPLETE
        with pytest.raises(Unavailable) as caught:
            bench.catalog.find("a")
        assert caught.value.code is Code.NOT_READY
        (folder / WEIGHTS).write_bytes(whole)
        bench.settle()
    assert bench.state("a") == "listed"
    assert bench.kinds("a") == ["discovered", "settling", "listed"]
    assert len(caplog.records) == 2


def test_a_half_written_config_is_no_refusal(bench: Bench) -> None:
    write_adapter(bench.root / "a")
    whole = config_bytes()
    for size in (0, 1, len(whole) // 2):
        (bench.root / "a" / CONFIG).write_bytes(whole[:size])
        bench.settle()
        assert bench.state("a") == "settling"
    (bench.root / "a" / CONFIG).write_bytes(whole)
    bench.settle()
    assert bench.kinds("a") == ["discovered", "settling", "listed"]


def test_it_waits_while_a_copying_tool_is_at_work(bench: Bench) -> None:
    """rsync and the Hub's client write under temporary names, the latter in a hidden folder below."""
    write_adapter(bench.root / "a")
    temporary = bench.root / "a" / ".cache" / "download" / "x.incomplete"
    temporary.parent.mkdir(parents=True)
    for size in range(5):
        temporary.write_bytes(b"x" * size)
        bench.catalog.scan()
        bench.clock.now += SETTLE * 0.9
    assert bench.state("a") == "discovered"
    bench.settle()
    assert bench.state("a") == "listed"


def test_rejected_with_its_reason_until_it_changes(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    write_adapter(bench.root / "a")
    (bench.root / "a" / CONFIG).write_bytes(config_bytes(peft_type="IA3"))
    with caplog.at_level(logging.INFO, "lora_plugin"):
        bench.settle()
        bench.settle()
    with pytest.raises(AdapterRejected) as caught:
        bench.catalog.find("a")
    assert caught.value.code is Code.PEFT_TYPE_UNSUPPORTED
    assert len(caplog.records) == 1
    (bench.root / "a" / "README.md").write_text("nothing to do with it")
    bench.settle()
    assert bench.kinds("a") == ["discovered", "rejected"]
    (bench.root / "a" / CONFIG).write_bytes(config_bytes())
    bench.settle()
    assert bench.state("a") == "listed"


def test_updated_in_place_without_a_gap(bench: Bench) -> None:
    folder = bench.root / "a"
    write_adapter(folder, seed=1)
    bench.settle()
    old = bench.catalog.version_of("a")
    whole = weight_bytes(seed=2)
    for size in (0, 30, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:size])
        bench.settle()
        assert bench.catalog.find("a").version == old
    reason = bench.catalog.find("a").reason
    assert reason is not None
    assert reason.code is Code.INCOMPLETE
    (folder / WEIGHTS).write_bytes(whole)
    bench.catalog.scan()
    assert bench.catalog.find("a").version == old
    bench.settle()
    adapter = bench.catalog.find("a")
    assert adapter.version is not None
    assert adapter.version.digest != old.digest
    assert adapter.reason is None
    assert bench.kinds("a") == ["discovered", "listed", "settling", "updated"]


def test_the_same_bytes_are_the_same_version(bench: Bench) -> None:
    write_adapter(bench.root / "a", seed=1)
    bench.settle()
    version = bench.catalog.version_of("a")
    os.utime(bench.root / "a" / WEIGHTS)
    bench.settle()
    write_adapter(bench.root / "a", seed=1)
    (bench.root / "a" / "notes.txt").write_text("x")
    bench.settle()
    assert bench.catalog.find("a").version == version
    assert bench.kinds("a") == ["discovered", "listed"]


def test_replaced_by_rename(bench: Bench, tmp_path: Path) -> None:
    write_adapter(bench.root / "a", seed=1)
    bench.settle()
    old = bench.catalog.version_of("a")
    write_adapter(tmp_path / "new", seed=2)
    (bench.root / "a").rename(tmp_path / "old")
    (tmp_path / "new").rename(bench.root / "a")
    bench.catalog.scan()
    assert bench.catalog.find("a").version == old
    bench.settle()
    assert bench.catalog.version_of("a") != old
    assert bench.kinds("a") == ["discovered", "listed", "updated"]


def test_a_rewrite_that_keeps_size_and_time_is_seen(bench: Bench) -> None:
    write_adapter(bench.root / "a", seed=1)
    file = bench.root / "a" / WEIGHTS
    before = file.stat()
    bench.settle()
    old = bench.catalog.version_of("a")
    file.write_bytes(weight_bytes(seed=2))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    bench.settle()
    assert bench.catalog.version_of("a") != old


def test_bad_content_ends_the_old_version_after_a_while(bench: Bench) -> None:
    write_adapter(bench.root / "a")
    bench.settle()
    old = bench.catalog.version_of("a")
    (bench.root / "a" / CONFIG).write_bytes(config_bytes(r=5))
    bench.settle()
    assert bench.state("a") == "listed"
    bench.settle(5 * SETTLE)
    assert bench.state("a") == "rejected"
    last = bench.catalog.events.since()[-1]
    assert (last.kind, last.version) == ("rejected", old.digest)


def test_deleted_at_once(bench: Bench) -> None:
    write_adapter(bench.root / "a")
    bench.settle()
    shutil.rmtree(bench.root / "a")
    bench.catalog.scan(("a",))
    with pytest.raises(AdapterNotFound):
        bench.catalog.find("a")
    assert bench.catalog.list() == ()
    write_adapter(bench.root / "a")
    bench.settle()
    assert bench.kinds("a") == ["discovered", "listed", "retired", "discovered", "listed"]


def test_files_gone_are_a_copy_in_progress(bench: Bench) -> None:
    """`rsync --delete` and `cp` into an emptied folder pass through this."""
    write_adapter(bench.root / "a")
    bench.settle()
    (bench.root / "a" / WEIGHTS).unlink()
    bench.settle(10)
    assert bench.state("a") == "listed"
    with pytest.raises(AdapterIncomplete) as caught:
        bench.catalog.version_of("a")
    assert caught.value.code in (Code.CHANGED, Code.INCOMPLETE, Code.WEIGHTS_MISSING)


def test_the_directory_gone_is_no_deletion(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    write_adapter(bench.root / "a")
    bench.settle()
    away = bench.root.with_name("away")
    with caplog.at_level(logging.INFO, "lora_plugin"):
        bench.root.rename(away)
        bench.catalog.scan()
        bench.catalog.scan(("a",))
        bench.catalog.scan()
        assert bench.state("a") == "listed"
        assert len(caplog.records) == 1
        away.rename(bench.root)
        bench.catalog.scan()
        assert len(caplog.records) == 2
    assert bench.kinds("a") == ["discovered", "listed"]


def test_what_was_decided_stays_while_the_directory_is_gone(bench: Bench) -> None:
    for name in "ab":
        write_adapter(bench.root / name)
    bench.settle()
    bench.catalog.unload("a")
    bench.catalog.pin("b")
    bench.catalog.scan()
    away = bench.root.with_name("away")
    bench.root.rename(away)
    for _ in range(2):
        bench.catalog.scan()
        assert bench.state("a") == "unloaded"
        assert [adapter.pinned for adapter in bench.catalog.list()] == [False, True]
        if away.exists():
            away.rename(bench.root)
    (bench.root / FOLDER / "state.json").unlink()
    bench.catalog.scan()
    assert bench.state("a") == "listed"


def test_an_unmounted_directory_is_no_deletion(tmp_path: Path) -> None:
    """What is left of a mount is an empty directory on another device."""
    folders = AdapterFolders(tmp_path, LAYOUT, taken=(), max_bytes=1)
    write_adapter(tmp_path / "a")
    assert folders.names() == {"a"}
    shutil.rmtree(tmp_path / "a")
    assert folders.reachable()
    assert folders.names() == set()
    folders._device = tmp_path.stat().st_dev + 1
    assert not folders.reachable()
    assert folders.names() is None
    write_adapter(tmp_path / "b")
    assert folders.names() == {"b"}
    assert folders.reachable()


@pytest.mark.parametrize(
    "name", [".hidden", "..data", "..2024_01_01", "a.tmp", "a.partial", "a~", ".a.X3fG2h", FOLDER]
)
def test_temporary_names_are_not_there(bench: Bench, name: str) -> None:
    write_adapter(bench.root / name)
    bench.settle()
    assert bench.catalog.list() == ()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("base", Code.NAME_RESERVED),
        ("text", Code.NAME_RESERVED),
        ("my adapter", Code.NAME_INVALID),
        ("ä", Code.NAME_INVALID),
    ],
)
def test_names_that_cannot_be_served(bench: Bench, name: str, code: Code) -> None:
    write_adapter(bench.root / name)
    bench.settle()
    with pytest.raises(AdapterRejected) as caught:
        bench.catalog.find(name)
    assert caught.value.code is code


@pytest.mark.parametrize("name", ["", ".", "..", "../secret", "/etc", "a/b", "a\0b"])
def test_names_from_requests_are_looked_up_only(bench: Bench, name: str) -> None:
    with pytest.raises(AdapterNotFound):
        bench.catalog.find(name)
    bench.catalog.scan((name,))
    assert bench.catalog.list() == ()


def test_links(bench: Bench, tmp_path: Path) -> None:
    write_adapter(tmp_path / "outside")
    write_adapter(bench.root / "real", seed=1)
    (bench.root / "out").symlink_to(tmp_path / "outside")
    (bench.root / "in").symlink_to("real")
    (bench.root / "circle").symlink_to("circle")
    (bench.root / "nowhere").symlink_to("missing")
    bench.settle()
    assert {adapter.name: adapter.state for adapter in bench.catalog.list()} == {
        "in": "listed",
        "out": "rejected",
        "real": "listed",
    }
    with pytest.raises(AdapterRejected) as caught:
        bench.catalog.find("out")
    assert caught.value.code is Code.PATH_ESCAPE


def test_a_kubernetes_volume_is_swapped(bench: Bench) -> None:
    folder = bench.root / "a"
    write_adapter(folder / "..v1", seed=1)
    write_adapter(folder / "..v2", seed=2)
    (folder / "..data").symlink_to("..v1")
    for file in (CONFIG, WEIGHTS):
        (folder / file).symlink_to(f"..data/{file}")
    bench.settle()
    old = bench.catalog.version_of("a")
    (folder / "..next").symlink_to("..v2")
    (folder / "..next").rename(folder / "..data")
    bench.settle()
    assert bench.catalog.version_of("a") != old


def test_a_worker_found_it_bad(bench: Bench) -> None:
    write_adapter(bench.root / "a", seed=1)
    bench.settle()
    version = bench.catalog.version_of("a")
    bench.catalog.reject("a", "0" * 64, NAN)
    assert bench.state("a") == "listed"
    bench.catalog.reject("a", version.digest, NAN)
    with pytest.raises(AdapterRejected) as caught:
        bench.catalog.version_of("a")
    assert caught.value.reason == NAN
    (bench.root / "a" / "README.md").write_text("x")
    bench.settle()
    assert bench.state("a") == "rejected"
    bench.catalog.reload("a")
    assert bench.state("a") == "listed"
    bench.catalog.reject("a", bench.catalog.version_of("a").digest, NAN)
    write_adapter(bench.root / "a", seed=2)
    bench.settle()
    assert bench.state("a") == "listed"


def test_unloaded_until_its_files_change(bench: Bench) -> None:
    write_adapter(bench.root / "a", seed=1)
    bench.settle()
    assert bench.catalog.unload("a").state == "unloaded"
    with pytest.raises(AdapterNotFound) as caught:
        bench.catalog.find("a")
    assert caught.value.code is Code.UNLOADED
    bench.settle()
    assert bench.state("a") == "unloaded"
    restarted = Bench(bench.root)
    restarted.settle()
    assert restarted.state("a") == "unloaded"
    assert restarted.kinds("a") == ["discovered", "unloaded"]
    write_adapter(bench.root / "a", seed=2)
    bench.settle()
    assert bench.state("a") == "listed"


def test_unloaded_holds_wherever_the_directory_is_mounted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replicas of a volume see other paths and device numbers, and so does one that is restarted."""
    write_adapter(bench.root / "a")
    bench.settle()
    bench.catalog.unload("a")
    bench.root = bench.root.rename(bench.root.with_name("elsewhere"))
    status = FileStamp.of

    def mounted_again(name: str, path: Path, found: os.stat_result) -> FileStamp:
        stamp = status(name, path, found)
        return replace(stamp, device=stamp.device + 1)

    monkeypatch.setattr(FileStamp, "of", mounted_again)
    bench.catalog = bench.another()
    bench.settle()
    assert bench.state("a") == "unloaded"


def test_operators_decisions_reach_every_server(bench: Bench) -> None:
    write_adapter(bench.root / "a")
    other = bench.another()
    bench.settle()
    other.scan()
    bench.clock.now += 1
    other.scan()
    bench.catalog.unload("a")
    bench.catalog.scan()
    other.scan(())
    assert [adapter.state for adapter in other.list()] == ["unloaded"]
    other.reload("a")
    bench.catalog.scan(())
    assert bench.state("a") == "listed"
    assert bench.catalog.pin("a").pinned
    other.scan(())
    assert other.find("a").pinned
    assert not other.unpin("a").pinned
    # Another process's word is told here as well, so that engines follow it.
    bench.catalog.scan(())
    assert bench.kinds("a")[-2:] == ["pinned", "unpinned"]
    with pytest.raises(AdapterNotFound):
        bench.catalog.pin("nobody")
    with pytest.raises(AdapterNotFound):
        bench.catalog.reload("nobody")


def test_many_ask_for_one_version(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(bench.root / "a")
    bench.settle()
    count, gate, verify = Counter[str](), threading.Event(), reader.verify

    def slow(*args: Any) -> str:
        count["verify"] += 1
        gate.wait(5)
        return verify(*args)

    monkeypatch.setattr(reader, "verify", slow)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(bench.catalog.version_of("a"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8
    assert count["verify"] == 1


def test_unchanged_folders_are_not_opened(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(bench.root / "good")
    write_adapter(bench.root / "bad")
    (bench.root / "bad" / CONFIG).write_bytes(config_bytes(r=3))
    (bench.root / "partial").mkdir()
    bench.settle()
    monkeypatch.setattr(
        "lora_plugin.directory.folders.inspect", lambda *args: pytest.fail("it was inspected")
    )
    for _ in range(3):
        bench.settle()
    assert [bench.state(name) for name in ("good", "bad", "partial")] == ["listed", "rejected", "settling"]


def test_a_check_that_breaks_concerns_one_folder(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect = folders.inspect

    def broken(root: Path, name: str, *args: Any) -> object:
        if name == "a":
            raise ZeroDivisionError
        return inspect(root, name, *args)

    monkeypatch.setattr(folders, "inspect", broken)
    write_adapter(bench.root / "a")
    write_adapter(bench.root / "b")
    bench.settle()
    assert [bench.state(name) for name in "ab"] == ["rejected", "listed"]
    with pytest.raises(AdapterRejected) as caught:
        bench.catalog.find("a")
    assert caught.value.code is Code.INTERNAL


def test_the_disk_does_not_answer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(bench.root / "a")
    bench.settle()

    def fail(*args: object) -> str:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("lora_plugin.directory.folders.AdapterFolders.stamp", fail)
        assert bench.catalog.scan() is None
    assert bench.state("a") == "listed"
    bench.settle()
    assert bench.kinds("a") == ["discovered", "listed"]


@pytest.mark.parametrize("served", [False, True])
def test_a_file_that_could_not_be_read_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """Without descriptors, or with a disk that fails: nothing will change when that has passed."""
    if served:
        write_adapter(bench.root / "a", seed=1)
        bench.settle()
        bench.catalog.version_of("a")
    write_adapter(bench.root / "a", seed=2, rank=8)

    def fail(*args: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr("lora_plugin.adapter.files.open_plain", fail)
        bench.settle()
    assert bench.state("a") == ("listed" if served else "settling")
    bench.settle()
    assert bench.catalog.find("a").rank == 8


def test_a_subfolder_that_becomes_a_file_while_it_is_looked_at(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(bench.root / "a")
    (bench.root / "a" / "runs").mkdir()
    bench.settle()
    list_folder = os.scandir

    def disturbed(path: Any) -> Any:
        if str(path).endswith("runs") and Path(path).is_dir():
            Path(path).rmdir()
            Path(path).touch()
        return list_folder(path)

    with monkeypatch.context() as busy:
        busy.setattr("lora_plugin.directory.folders.os.scandir", disturbed)
        bench.settle()
    assert bench.kinds("a") == ["discovered", "listed"]


def test_changed_during_the_check(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was checked may be half of one content and half of the next."""
    inspect = folders.inspect

    def disturbed(*args: Any) -> object:
        found = inspect(*args)
        write_adapter(bench.root / "a", seed=2, rank=8)
        return found

    write_adapter(bench.root / "a", seed=1, rank=4)
    with monkeypatch.context() as busy:
        busy.setattr(folders, "inspect", disturbed)
        bench.settle()
    assert bench.state("a") == "discovered"
    bench.settle()
    assert bench.catalog.find("a").rank == 8


def test_subscribers_may_call_the_catalog(bench: Bench) -> None:
    seen: list[str] = []

    def follow(event: object) -> None:
        bench.catalog.scan(())
        seen.extend(adapter.name for adapter in bench.catalog.list())

    bench.catalog.events.subscribe(follow)
    write_adapter(bench.root / "a")
    bench.settle()
    assert seen == ["a", "a"]
