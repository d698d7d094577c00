"""`.lora_plugin` belongs to whoever may write into the directory: no way from there to other files."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

import lora_plugin.directory.own_folder
from lora_plugin.directory.own_folder import FOLDER, find_own_folder
from lora_plugin.directory.state import State
from lora_plugin.hub.origin import FILE, Origin
from lora_plugin.hub.reference import HubReference, write_reference
from lora_plugin.sources.incoming import Incoming


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "adapters").mkdir()
    return tmp_path / "adapters"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Another's folder, which nothing was written into for a day."""
    files = tmp_path / "victim" / "papers"
    files.mkdir(parents=True)
    (files / "file").write_text("precious")
    for path in (files / "file", files):
        os.utime(path, (0, 0))
    return tmp_path / "victim"


def test_nothing_is_removed_behind_a_link(root: Path, victim: Path) -> None:
    (root / FOLDER).mkdir()
    (root / FOLDER / "incoming").symlink_to(victim)
    Incoming(root, 1).clean()
    assert (victim / "papers" / "file").read_text() == "precious"
    shutil.rmtree(root / FOLDER)
    (victim / "incoming").symlink_to(".")
    (root / FOLDER).symlink_to(victim)
    Incoming(root, 1).clean()
    assert (victim / "papers" / "file").read_text() == "precious"


def test_nothing_is_written_behind_a_link_to_a_folder(root: Path, victim: Path) -> None:
    (root / FOLDER).symlink_to(victim)
    State(root).pin("a")
    with pytest.raises(OSError, match="a link"):
        write_reference(root, "a", HubReference(repo="org/a"))
    with pytest.raises(OSError, match="a link"):
        find_own_folder(root)
    assert [path.name for path in victim.iterdir()] == ["papers"]


@pytest.mark.parametrize("name", ["state.json.{pid}.tmp", "a.hub.yaml.{pid}.tmp", "state.json", "lock"])
def test_nothing_is_written_behind_a_link_to_a_file(root: Path, victim: Path, name: str) -> None:
    (root / FOLDER).mkdir()
    file = victim / "papers" / "file"
    (root / FOLDER / name.format(pid=os.getpid())).symlink_to(file)
    state = State(root)
    state.pin("a")
    write_reference(root, "a", HubReference(repo="org/a"))
    assert state.pinned == {"a"}
    assert (file.read_text(), file.stat().st_mtime) == ("precious", 0)


def test_a_lock_that_is_never_given_back_is_waited_for_only_so_long(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_plugin.directory.own_folder, "_LOCK_SECONDS", 0.1)
    (root / FOLDER).mkdir()
    with (root / FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        State(root).pin("a")
    again = State(root)
    again.reload()
    assert again.pinned == {"a"}


def test_no_draft_stays_where_the_disk_is_full(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        State(root).pin("a")
    assert [path.name for path in (root / FOLDER).iterdir()] == ["lock"]


def test_a_folder_in_the_place_of_a_file_costs_no_descriptor(root: Path) -> None:
    (root / FILE).mkdir()
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        assert Origin.of(root) is None
    assert len([*Path("/proc/self/fd").iterdir()]) == before
