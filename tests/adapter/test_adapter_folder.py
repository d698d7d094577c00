"""The folder: what is not whole yet, what leads out, what may not be read, and whether anything changed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_samples import LIMIT, edit_config, shard

from lora_plugin.adapter import load as module
from lora_plugin.adapter.folder import FolderSnapshot, fingerprint, snapshot
from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load, verify
from lora_plugin.errors import AdapterIncomplete, AdapterNotFound, AdapterRejected, Code, LoraPluginError
from lora_plugin.layout import ModelLayout

WEIGHTS = "adapter_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
CONFIG = "adapter_config.json"


def failure(folder: Path, layout: ModelLayout, limit: int = LIMIT) -> LoraPluginError:
    """What both the header check and the load say of the folder."""
    with pytest.raises(LoraPluginError) as seen:
        inspect(folder.parent, folder.name, layout, limit)
    with pytest.raises(LoraPluginError) as loaded:
        load(folder.parent, folder.name, layout, None, limit)
    assert seen.value.reason == loaded.value.reason
    assert str(folder.parent) not in str(seen.value)
    return seen.value


def incomplete(folder: Path, layout: ModelLayout) -> Code:
    error = failure(folder, layout)
    assert isinstance(error, AdapterIncomplete)
    return error.code


def rejected(folder: Path, layout: ModelLayout, limit: int = LIMIT) -> Code:
    error = failure(folder, layout, limit)
    assert isinstance(error, AdapterRejected)
    return error.code


def look(folder: Path) -> FolderSnapshot:
    return snapshot(folder.parent, folder.name, LIMIT)


def test_parts_that_have_not_arrived(folder: Path, layout: ModelLayout) -> None:
    (folder / CONFIG).rename(folder / "kept")
    assert incomplete(folder, layout) is Code.CONFIG_MISSING
    (folder / WEIGHTS).unlink()
    (folder / "checkpoint-9").mkdir()
    (folder / "checkpoint-9" / CONFIG).write_text("{}")
    error = failure(folder, layout)
    assert (error.code, "'checkpoint-9'" in (error.reason.hint or "")) == (Code.CONFIG_MISSING, True)
    (folder / "kept").rename(folder / CONFIG)
    assert incomplete(folder, layout) is Code.WEIGHTS_MISSING


def test_an_adapter_in_an_adapters_folder_is_warned_of(folder: Path, layout: ModelLayout) -> None:
    """`cp -r new sql` and `mv new sql`, where `sql` is there already."""
    before = inspect(folder.parent, folder.name, layout, LIMIT)
    shutil.copytree(folder, folder / "new")
    (folder / "runs").mkdir()
    after = inspect(folder.parent, folder.name, layout, LIMIT)
    assert before.warnings == ()
    assert after.warnings == (
        "the adapter in its folder 'new' is not served: to update, write its files over these",
    )
    assert after.snapshot.fingerprint == before.snapshot.fingerprint


def test_shards_that_have_not_arrived(folder: Path, layout: ModelLayout) -> None:
    shard(folder)
    first, second = sorted(folder.glob("*.safetensors"))
    raw = (folder / INDEX).read_bytes()
    (folder / INDEX).write_bytes(raw[:-10])
    assert incomplete(folder, layout) is Code.INCOMPLETE
    (folder / INDEX).write_bytes(raw)
    first.rename(folder / "kept")
    assert incomplete(folder, layout) is Code.WEIGHTS_MISSING
    (folder / "kept").rename(first)
    second.write_bytes(second.read_bytes()[:-1])
    assert incomplete(folder, layout) is Code.INCOMPLETE


def test_every_copy_in_progress_is_incomplete(folder: Path, layout: ModelLayout) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    for size in [*range(40), *range(40, len(raw), 97), len(raw) - 1]:
        (folder / WEIGHTS).write_bytes(raw[:size])
        assert incomplete(folder, layout) is Code.INCOMPLETE
    (folder / WEIGHTS).write_bytes(b"\0" * len(raw))
    assert incomplete(folder, layout) is Code.INCOMPLETE


@pytest.mark.parametrize("name", ["absent", "file"])
def test_no_folder(name: str, folder: Path, layout: ModelLayout) -> None:
    (folder.parent / "file").write_text("x")
    with pytest.raises(AdapterNotFound):
        inspect(folder.parent, name, layout, LIMIT)
    with pytest.raises(AdapterNotFound):
        load(folder.parent, name, layout, None, LIMIT)
    assert fingerprint(folder.parent, name) == "not-found"


@pytest.mark.parametrize(
    "name", ["..", ".", "", "../good", "/etc", "good/", "a\0b", "..data", "good.tmp", "x" * 300]
)
def test_names_are_checked_before_the_disk_is_asked(name: str, folder: Path, layout: ModelLayout) -> None:
    with pytest.raises(AdapterRejected) as caught:
        load(folder.parent, name, layout, None, LIMIT)
    assert caught.value.code is Code.NAME_INVALID
    assert fingerprint(folder.parent, name) == "name-invalid"


def test_pickled_weights_only(folder: Path, layout: ModelLayout) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert rejected(folder, layout) is Code.WEIGHTS_FORMAT


def test_pickled_weights_beside_good_ones_are_not_looked_at(folder: Path, layout: ModelLayout) -> None:
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    assert inspect(folder.parent, "good", layout, LIMIT).rank == 8


def test_sizes_beyond_the_limit_are_refused_unread(
    folder: Path, layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (folder / CONFIG).stat().st_size + (folder / WEIGHTS).stat().st_size
    assert inspect(folder.parent, "good", layout, size).nbytes == size
    monkeypatch.setattr(module, "open_stamped", lambda _: pytest.fail("was opened"))
    assert rejected(folder, layout, size - 1) is Code.TOO_LARGE


def test_a_config_or_an_index_beyond_its_limit(folder: Path, layout: ModelLayout) -> None:
    edit_config(folder, padding="x" * (1 << 20))
    assert rejected(folder, layout) is Code.TOO_LARGE
    edit_config(folder, padding="")
    shard(folder)
    (folder / INDEX).write_bytes(b" " * ((16 << 20) + 1))
    assert rejected(folder, layout, 1 << 30) is Code.TOO_LARGE


@pytest.mark.parametrize("prefix", [1 << 40, (32 << 20) + 1])
def test_a_header_beyond_its_limit(prefix: int, folder: Path, layout: ModelLayout) -> None:
    (folder / WEIGHTS).write_bytes(prefix.to_bytes(8, "little") + b"x" * 100)
    assert rejected(folder, layout) is Code.WEIGHTS_INVALID


def test_a_git_lfs_pointer(folder: Path, layout: ModelLayout) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    error = failure(folder, layout)
    assert (error.code, "git lfs pull" in (error.reason.hint or "")) == (Code.WEIGHTS_INVALID, True)


@pytest.mark.parametrize("part", [".", CONFIG, WEIGHTS])
@pytest.mark.parametrize("relative", [True, False])
def test_links_that_lead_out(part: str, relative: bool, folder: Path, layout: ModelLayout) -> None:
    inside = folder / part
    outside = folder.parent.parent / "outside"
    inside.rename(outside)
    target = os.path.relpath(outside, inside.parent) if relative else outside
    Path(os.path.normpath(inside)).symlink_to(target)
    assert rejected(folder, layout) is Code.PATH_ESCAPE
    packed = load(folder.parent, "good", layout, None, LIMIT, trusted=True)
    assert packed.rank == 8


@pytest.mark.parametrize(
    "file", ["../out.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "x.bin", 3, "a\0.safetensors"]
)
def test_shards_outside_the_folder(file: Any, folder: Path, layout: ModelLayout) -> None:
    (folder / WEIGHTS).rename(folder.parent / "out.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    assert rejected(folder, layout) is Code.WEIGHTS_INVALID


@pytest.mark.parametrize("document", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_files(document: object, folder: Path, layout: ModelLayout) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps(document))
    assert rejected(folder, layout) is Code.WEIGHTS_INVALID


def test_kubernetes_links_inside_the_directory(folder: Path, layout: ModelLayout) -> None:
    before = fingerprint(folder.parent, "good")
    for version in ("..2026_1", "..2026_2"):
        (folder / version).mkdir()
        for name in (CONFIG, WEIGHTS):
            shutil.copy(folder / name, folder / version / name)
    edit_config(folder / "..2026_2", lora_alpha=32)
    (folder / "..data").symlink_to("..2026_1")
    for name in (CONFIG, WEIGHTS):
        (folder / name).unlink()
        (folder / name).symlink_to(f"..data/{name}")
    first = inspect(folder.parent, "good", layout, LIMIT)
    assert first.config.alpha == 16
    (folder / "..new").symlink_to("..2026_2")
    (folder / "..new").rename(folder / "..data")
    second = inspect(folder.parent, "good", layout, LIMIT)
    assert second.config.alpha == 32
    assert len({before, first.snapshot.fingerprint, second.snapshot.fingerprint}) == 3


def test_files_of_another_kind(folder: Path, layout: ModelLayout) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    assert rejected(folder, layout) is Code.UNREADABLE
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert rejected(folder, layout) is Code.UNREADABLE


@pytest.fixture
def as_nobody(folder: Path) -> Iterator[Path]:
    """A copy of the folder that other users can reach, while the test runs as one of them."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        copy = Path(shutil.copytree(folder, Path(place) / "good"))
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        yield copy
        os.seteuid(user)
        copy.chmod(0o755)


@pytest.mark.parametrize("part", [".", CONFIG, WEIGHTS])
def test_missing_rights_are_named(part: str, as_nobody: Path, layout: ModelLayout) -> None:
    user = os.geteuid()
    os.seteuid(os.getuid())
    (as_nobody / part).chmod(0o000)
    os.seteuid(user)
    error = failure(as_nobody, layout)
    assert isinstance(error, AdapterRejected)
    assert error.code is Code.UNREADABLE
    assert "mode 0000" in str(error) or "may not be entered" in str(error)
    assert part == "." or part in error.reason.message


CHANGES: dict[str, Callable[[Path], object]] = {
    "touched": lambda folder: os.utime(folder / WEIGHTS),
    "rewritten at the old time": lambda folder: rewrite_at_the_old_time(folder / WEIGHTS),
    "config": lambda folder: edit_config(folder, lora_alpha=3),
    "replaced": lambda folder: shutil.copy2(folder / WEIGHTS, folder / "x").rename(folder / WEIGHTS),
    "longer": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"x"),
    "gone": lambda folder: (folder / WEIGHTS).unlink(),
    "folder gone": shutil.rmtree,
    "pickle added": lambda folder: (folder / "adapter_model.bin").touch(),
}


def rewrite_at_the_old_time(path: Path) -> None:
    status = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_shows_in_the_fingerprint(change: Callable[[Path], object], folder: Path) -> None:
    seen = look(folder)
    assert fingerprint(folder.parent, "good") == seen.fingerprint
    verify(folder.parent, "good", seen)
    change(folder)
    assert fingerprint(folder.parent, "good") != seen.fingerprint
    with pytest.raises(AdapterIncomplete) as caught:
        verify(folder.parent, "good", seen)
    assert caught.value.code in (Code.CHANGED, Code.INCOMPLETE)


def test_what_does_not_matter_does_not_show(folder: Path) -> None:
    before = fingerprint(folder.parent, "good")
    (folder / "README.md").write_text("x")
    (folder / "checkpoint-1").mkdir(exist_ok=True)
    assert fingerprint(folder.parent, "good") == before


def test_the_digest_is_of_the_content(folder: Path, layout: ModelLayout) -> None:
    digest = verify(folder.parent, "good", look(folder))
    shutil.copytree(folder, folder.parent / "other")
    config = json.loads((folder / CONFIG).read_text())
    (folder.parent / "other" / CONFIG).write_text(json.dumps(dict(reversed(config.items()))))
    assert verify(folder.parent, "other", look(folder.parent / "other")) == digest
    assert load(folder.parent, "other", layout, digest, LIMIT).rank == 8
    edit_config(folder, lora_alpha=3)
    assert verify(folder.parent, "good", look(folder)) != digest
    with pytest.raises(AdapterIncomplete) as caught:
        load(folder.parent, "good", layout, digest, LIMIT)
    assert caught.value.code is Code.CHANGED


@pytest.mark.parametrize("expect", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: os.truncate(path, 100),
        lambda path: os.truncate(path, path.stat().st_size - 5),
        lambda path: path.write_bytes(path.read_bytes()[:-4] + b"abcd"),
        lambda path: shutil.rmtree(path.parent),
        lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    ],
)
def test_changes_between_the_headers_and_the_weights(
    change: Callable[[Path], object],
    expect: bool,
    folder: Path,
    layout: ModelLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = verify(folder.parent, "good", look(folder)) if expect else None
    match = module.match

    def match_then_change(*arguments: Any) -> object:
        plan = match(*arguments)
        change(folder / WEIGHTS)
        return plan

    monkeypatch.setattr(module, "match", match_then_change)
    with pytest.raises(AdapterIncomplete):
        load(folder.parent, "good", layout, digest, LIMIT)


@pytest.mark.parametrize("expect", [True, False])
def test_changes_while_the_weights_are_read(
    expect: bool, folder: Path, layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = verify(folder.parent, "good", look(folder)) if expect else None
    opened = module.open_stamped
    count = 0

    def open_then_overwrite(stamp: Any) -> Any:
        nonlocal count
        file = opened(stamp)
        count += 1
        if count == 3:  # config, header, weights
            with (folder / WEIGHTS).open("r+b") as weights:
                weights.seek(-8, os.SEEK_END)
                weights.write(b"abcdefgh")
        return file

    monkeypatch.setattr(module, "open_stamped", open_then_overwrite)
    monkeypatch.setattr("lora_plugin.adapter.files.open_stamped", open_then_overwrite)
    monkeypatch.setattr("lora_plugin.adapter.inspection.open_stamped", open_then_overwrite)
    with pytest.raises(AdapterIncomplete) as caught:
        load(folder.parent, "good", layout, digest, LIMIT)
    assert (count, caught.value.code) == (3, Code.CHANGED)


def test_a_failing_file_system(folder: Path, layout: ModelLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("lora_plugin.adapter.files.os.open", fail)
    assert incomplete(folder, layout) is Code.UNREADABLE


def test_an_operators_own_path(folder: Path, layout: ModelLayout) -> None:
    odd = folder.rename(folder.parent / ".my adapter~")
    seen = inspect(odd.parent, odd.name, layout, LIMIT, trusted=True)
    digest = verify(odd.parent, odd.name, seen.snapshot, trusted=True)
    assert load(odd.parent, odd.name, layout, digest, LIMIT, trusted=True).rank == 8
