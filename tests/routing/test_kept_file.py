"""A routing file is replaced as a whole, when it is quiet, and only by a good one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lora_plugin.errors import Code
from lora_plugin.routing.files import RoutingFiles
from lora_plugin.routing.kept_file import KeptFile

SETTLE = 0.2


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def parse(document: object) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ValueError("no mapping")
    return document


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept(tmp_path: Path, clock: Clock) -> KeptFile[dict[str, Any]]:
    return KeptFile(tmp_path / "names.yaml", parse, {}, settle_seconds=SETTLE, clock=clock)


def settle(kept: KeptFile[dict[str, Any]], clock: Clock) -> None:
    kept.look()
    clock.now += SETTLE
    assert kept.look() is None


def test_it_is_read_when_it_is_quiet(kept: KeptFile[dict[str, Any]], clock: Clock, tmp_path: Path) -> None:
    assert kept.look() is None
    path = tmp_path / "names.yaml"
    path.write_text("a: 1")
    assert kept.look() == pytest.approx(SETTLE)
    assert kept.value == {}
    clock.now += SETTLE / 2
    path.write_text("a: 1\nb: 2")
    assert kept.look() == pytest.approx(SETTLE)
    clock.now += SETTLE
    assert kept.look() is None
    assert kept.value == {"a": 1, "b": 2}


def test_at_the_start_nothing_is_waited_for(kept: KeptFile[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text("a: 1")
    kept.look(at_once=True)
    assert kept.value == {"a": 1}


@pytest.mark.parametrize("bad", [b"- a", b"a: {", b"\xff\xfe\x00", b"x" * ((1 << 20) + 1)])
def test_a_bad_file_changes_nothing_and_says_why(
    kept: KeptFile[dict[str, Any]], clock: Clock, tmp_path: Path, bad: bytes
) -> None:
    path = tmp_path / "names.yaml"
    path.write_text("a: 1")
    settle(kept, clock)
    path.write_bytes(bad)
    settle(kept, clock)
    assert kept.value == {"a": 1}
    assert kept.reason is not None
    assert kept.reason.code is Code.ROUTING_INVALID
    assert str(tmp_path) not in str(kept.reason)
    path.write_text("b: 2")
    settle(kept, clock)
    assert (kept.value, kept.reason) == ({"b": 2}, None)


def test_gone_means_empty_but_not_with_its_directory(
    kept: KeptFile[dict[str, Any]], clock: Clock, tmp_path: Path
) -> None:
    path = tmp_path / "names.yaml"
    path.write_text("a: 1")
    settle(kept, clock)
    tmp_path.rename(tmp_path.with_name("away"))
    settle(kept, clock)
    assert kept.value == {"a": 1}
    tmp_path.with_name("away").rename(tmp_path)
    path.unlink()
    settle(kept, clock)
    assert kept.value == {}


def test_what_is_no_file_is_not_opened(kept: KeptFile[dict[str, Any]], clock: Clock, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "names.yaml")
    settle(kept, clock)
    assert kept.reason is not None
    assert "not a file" in kept.reason.message


def test_a_folder_in_its_place_costs_no_descriptor(
    kept: KeptFile[dict[str, Any]], clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "names.yaml").mkdir()
    before = len([*Path("/proc/self/fd").iterdir()])
    settle(kept, clock)
    assert kept.reason is not None
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_link_stays_in_the_directory(tmp_path: Path, clock: Clock) -> None:
    """As a Kubernetes volume has them; one that leads out would show another's file as names."""
    root = tmp_path / "root"
    (root / "..data").mkdir(parents=True)
    kept = KeptFile(root / "names.yaml", parse, {}, settle_seconds=SETTLE, clock=clock)
    (root / "..data" / "names.yaml").write_text("a: 1")
    (root / "names.yaml").symlink_to("..data/names.yaml")
    settle(kept, clock)
    assert kept.value == {"a": 1}
    (tmp_path / "secret.yaml").write_text("password: hidden")
    (root / "names.yaml").unlink()
    (root / "names.yaml").symlink_to("../secret.yaml")
    settle(kept, clock)
    assert kept.value == {"a": 1}
    assert kept.reason is not None
    assert "leads out" in kept.reason.message


def test_an_unmounted_directory_takes_no_names_with_it(tmp_path: Path, clock: Clock) -> None:
    """What is left of a mount is an empty directory; the catalog knows."""
    there = True
    files = RoutingFiles(tmp_path, (), settle_seconds=0, reachable=lambda: there, clock=clock)
    (tmp_path / "aliases.yaml").write_text("prod: sql")
    files.look()
    (tmp_path / "aliases.yaml").unlink()
    there = False
    files.look()
    assert files.names == {"prod"}
    there = True
    files.look()
    assert files.names == set()
