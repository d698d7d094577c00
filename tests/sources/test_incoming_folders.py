"""What is fetched gets into the watched directory as a whole, or not at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from catalog_samples import write_adapter

from lora_plugin.errors import AdapterRejected, Code, LoraPluginError, Unavailable
from lora_plugin.sources.incoming import Incoming

LIMIT = 10_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("outside")
    folder = tmp_path / "adapters"
    folder.mkdir()
    return folder


def left_over(root: Path) -> list[str]:
    """Everything but what is served."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if ".lora_plugin/incoming/" in str(p))


def test_a_folder_appears_whole_under_its_name(root: Path) -> None:
    def fetch(folder: Path) -> None:
        write_adapter(folder)
        assert not (root / "poet").exists()

    nbytes = Incoming(root, LIMIT).receive("poet", fetch)
    assert sorted(path.name for path in (root / "poet").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert nbytes == sum(path.stat().st_size for path in (root / "poet").iterdir())
    assert left_over(root) == []


def test_a_folder_that_has_appeared_meanwhile_stays(root: Path) -> None:
    def fetch(folder: Path) -> None:
        write_adapter(folder, seed=1)
        write_adapter(root / "poet", seed=2)

    Incoming(root, LIMIT).receive("poet", fetch)
    write_adapter(root / "other", seed=2)
    weights = "adapter_model.safetensors"
    assert (root / "poet" / weights).read_bytes() == (root / "other" / weights).read_bytes()
    assert left_over(root) == []


def _link(folder: Path) -> None:
    write_adapter(folder)
    (folder / "README.md").symlink_to("../../../../secret")


def _hard_link(folder: Path) -> None:
    write_adapter(folder)
    (folder / "README.md").hardlink_to(folder.parents[3] / "secret")


def _pipe(folder: Path) -> None:
    write_adapter(folder)
    os.mkfifo(folder / "adapter_model.bin")


def _nested(folder: Path) -> None:
    write_adapter(folder / "poet")


def _no_config(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"x")


def _gone(folder: Path) -> None:
    folder.rmdir()


@pytest.mark.parametrize("fetch", [_link, _hard_link, _pipe, _nested, _no_config, _gone])
def test_anything_but_an_adapters_plain_files_is_refused(root: Path, fetch: Callable[[Path], None]) -> None:
    with pytest.raises(Unavailable, match="not an adapter folder") as raised:
        Incoming(root, LIMIT).receive("poet", fetch)
    assert raised.value.code is Code.FETCH_FAILED
    assert not (root / "poet").exists()
    assert left_over(root) == []


def test_what_a_fetch_raises_is_passed_on(root: Path) -> None:
    def fetch(folder: Path) -> None:
        write_adapter(folder)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        Incoming(root, LIMIT).receive("poet", fetch)
    assert not (root / "poet").exists()
    assert left_over(root) == []


def test_too_large_is_refused_afterwards_at_the_latest(root: Path) -> None:
    def fetch(folder: Path) -> None:
        write_adapter(folder)
        (folder / "more").mkdir()
        (folder / "more" / "bytes").write_bytes(bytes(LIMIT))

    with pytest.raises(AdapterRejected) as raised:
        Incoming(root, LIMIT).receive("poet", fetch)
    assert raised.value.code is Code.TOO_LARGE
    assert left_over(root) == []


def test_an_endless_download_is_ended_while_it_is_written(root: Path) -> None:
    """The folder is taken away: opening the next file in it fails."""
    parts = 0

    def fetch(folder: Path) -> None:
        nonlocal parts
        write_adapter(folder)
        while True:
            (folder / f"part-{parts}").write_bytes(bytes(LIMIT))
            parts += 1
            time.sleep(0.02)

    with pytest.raises(AdapterRejected) as raised:
        Incoming(root, LIMIT).receive("poet", fetch)
    assert raised.value.code is Code.TOO_LARGE
    assert parts > 0
    assert left_over(root) == []


@pytest.mark.parametrize("name", ["../out", ".hidden", "a/b", "", "x.tmp", "text"])
def test_a_name_is_never_a_path(root: Path, name: str) -> None:
    with pytest.raises(LoraPluginError):
        Incoming(root, LIMIT).receive(name, write_adapter)
    assert list(root.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_said_so(root: Path) -> None:
    (root / ".lora_plugin").write_text("not a folder")
    with pytest.raises(Unavailable, match="cannot be put into the watched directory"):
        Incoming(root, LIMIT).receive("poet", write_adapter)


def test_only_what_was_abandoned_is_cleaned(root: Path) -> None:
    incoming = root / ".lora_plugin" / "incoming"
    for name, age in (("old.1.aa", 7200), ("slow.1.bb", 7200), ("new.1.cc", 0)):
        write_adapter(incoming / name)
        for path in (*(incoming / name).iterdir(), incoming / name):
            os.utime(path, (time.time() - age,) * 2)
    (incoming / "slow.1.bb" / "part").write_bytes(b"x")
    os.utime(incoming / "slow.1.bb", (time.time() - 7200,) * 2)
    Incoming(root, LIMIT).clean()
    assert sorted(path.name for path in incoming.iterdir()) == ["new.1.cc", "slow.1.bb"]
