"""The state file: shared by servers, tolerant of damage, of use without a writable directory."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from lora_plugin.directory.own_folder import FOLDER
from lora_plugin.directory.state import State


def content(root: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((root / FOLDER / "state.json").read_bytes())
    return found


def test_decisions_outlive_the_process(tmp_path: Path) -> None:
    State(tmp_path).unload("a", "f1")
    State(tmp_path).pin("b")
    again = State(tmp_path)
    assert again.reload() == {"a", "b"}
    assert (dict(again.unloaded), set(again.pinned)) == ({"a": "f1"}, {"b"})
    again.restore("a")
    again.unpin("b")
    assert content(tmp_path) == {"unloaded": {}, "pinned": []}


def test_servers_see_each_other(tmp_path: Path) -> None:
    one, two = State(tmp_path), State(tmp_path)
    one.unload("a", "f1")
    two.pin("b")
    assert one.reload() == {"b"}
    assert one.reload() == set()
    # What was read on the way to writing is told as well.
    assert two.reload() == {"a"}
    assert (two.unloaded, two.pinned) == (one.unloaded, one.pinned)


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"unloaded": 3}', b'{"pinned": {"a": 1}}', b"\xff", b"[" * 5000],
)
def test_damage_counts_as_empty_and_is_said_once(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    state = State(tmp_path)
    state.unload("a", "f1")
    (tmp_path / FOLDER / "state.json").write_bytes(damage)
    with caplog.at_level(logging.WARNING, "lora_plugin"):
        assert state.reload() == {"a"}
        state.reload()
    assert len(caplog.records) == 1
    state.pin("b")
    assert content(tmp_path) == {"unloaded": {}, "pinned": ["b"]}


def test_a_newer_versions_keys_are_kept(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "state.json").write_text('{"aliases": {"x": "a"}, "pinned": []}')
    State(tmp_path).pin("a")
    assert content(tmp_path) == {"aliases": {"x": "a"}, "pinned": ["a"], "unloaded": {}}


def test_without_a_writable_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A file in the folder's place refuses root as well.
    (tmp_path / FOLDER).write_text("")
    state = State(tmp_path)
    with caplog.at_level(logging.WARNING, "lora_plugin"):
        state.pin("a")
        state.unload("b", "f1")
    assert len(caplog.records) == 1
    assert state.reload() == set()
    assert (dict(state.unloaded), set(state.pinned)) == ({"b": "f1"}, {"a"})
    (tmp_path / FOLDER).unlink()
    state.pin("c")
    assert content(tmp_path) == {"pinned": ["a", "c"], "unloaded": {"b": "f1"}}


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    os.mkfifo(tmp_path / FOLDER / "state.json")
    state = State(tmp_path)
    assert state.reload() == set()
    state.pin("a")
    assert content(tmp_path)["pinned"] == ["a"]


def test_what_cannot_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = State(tmp_path)
    state.unload("a", "f1")
    state.reload()
    file = tmp_path / FOLDER / "state.json"
    file.rename(file.with_name("away"))
    # A folder in the file's place refuses root as well.
    file.mkdir()
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    with caplog.at_level(logging.WARNING, "lora_plugin"):
        assert [state.reload(), state.reload()] == [set(), set()]
    assert (dict(state.unloaded), len(caplog.records)) == ({"a": "f1"}, 1)
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors
    file.rmdir()
    file.with_name("away").rename(file)
    assert state.reload() == set()
    assert dict(state.unloaded) == {"a": "f1"}
