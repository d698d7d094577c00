"""`name.hub.yaml` in the watched directory: fetched, listed, replaced and taken away as any other adapter."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from catalog_samples import (
    CONFIG,
    SETTLE,
    WEIGHTS,
    Clock,
    config_bytes,
    folders_of,
    weight_bytes,
    write_adapter,
)
from hypothesis import given
from hypothesis import strategies as st
from local_hub import COMMIT, LocalHub, Repository

import lora_plugin.hub.placing
from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.entry import Adapter, AdapterState
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.hub.origin import Origin
from lora_plugin.hub.reference import HubReference, is_allowed, is_repo, name_of, parse_reference, repo_of

OTHER = "2" * 40


class Server:
    """An API server's catalog over a directory."""

    def __init__(self, root: Path, *allow: str) -> None:
        self.root = root
        self.clock = Clock()
        folders = folders_of(root, allow=allow, clock=self.clock)
        self.catalog = Catalog(root, folders, settle_seconds=SETTLE, clock=self.clock)

    def rescan(self) -> None:
        for _ in range(2):
            self.catalog.scan()
            self.clock.now += SETTLE

    def get(self, name: str = "name") -> Adapter | None:
        self.rescan()
        return self.catalog.get(name)

    def until(self, condition: Callable[[Adapter | None], bool], name: str = "name") -> Adapter | None:
        """Rescans until it holds; fetches are on threads."""
        for _ in range(500):
            adapter = self.get(name)
            if condition(adapter):
                return adapter
            time.sleep(0.01)
        raise AssertionError(f"{adapter}")

    def until_state(self, state: AdapterState) -> Adapter:
        adapter = self.until(lambda found: found is not None and found.state is state)
        assert adapter is not None
        return adapter

    def until_gone(self) -> None:
        self.clock.now += 5
        self.until(lambda found: found is None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    folder.mkdir()
    return folder


@pytest.fixture
def adapter(hub: LocalHub) -> Repository:
    """org/name: an adapter that the model takes."""
    files = {CONFIG: config_bytes(), WEIGHTS: weight_bytes()}
    return hub.repositories.setdefault("org/name", Repository(files))


def refer(root: Path, text: str = "repo: org/name", name: str = "name") -> Path:
    file = root / f"{name}.hub.yaml"
    file.write_text(text)
    return file


def test_a_reference_becomes_an_adapter_and_goes_with_it(adapter: Repository, root: Path) -> None:
    server = Server(root, "org/*")
    file = refer(root)
    found = server.until_state(AdapterState.LISTED)
    assert found.source == f"hub:org/name@{COMMIT}"
    assert (root / "name" / WEIGHTS).read_bytes() == adapter.files[WEIGHTS]
    assert not list((root / ".lora_plugin" / "incoming").iterdir())
    write_adapter(root / "mine")
    file.unlink()
    server.until_gone()
    assert not (root / "name").exists()
    assert (root / "mine" / WEIGHTS).exists()


def test_an_editor_that_replaces_the_file_loses_nothing(adapter: Repository, root: Path) -> None:
    server = Server(root, "org/*")
    file = refer(root)
    server.until_state(AdapterState.LISTED)
    aside = file.rename(root / "name.hub.yaml~")
    server.rescan()
    aside.rename(file)
    server.clock.now += 5
    server.rescan()
    assert server.until_state(AdapterState.LISTED)
    assert (root / "name").exists()


def test_what_is_there_needs_no_hub(hub: LocalHub, adapter: Repository, root: Path) -> None:
    refer(root)
    Server(root, "org/*").until_state(AdapterState.LISTED)
    hub.seen.clear()
    assert Server(root, "org/*").until_state(AdapterState.LISTED)
    assert not hub.seen


def test_a_reference_removed_while_no_server_ran(adapter: Repository, root: Path) -> None:
    file = refer(root)
    Server(root, "org/*").until_state(AdapterState.LISTED)
    file.unlink()
    server = Server(root, "org/*")
    server.rescan()
    server.until_gone()
    assert not (root / "name").exists()


def test_a_copy_of_a_fetched_folder_is_a_persons(adapter: Repository, root: Path) -> None:
    """Made to keep a version that works: it must be there after the next start, too."""
    file = refer(root)
    Server(root, "org/*").until_state(AdapterState.LISTED)
    shutil.copytree(root / "name", root / "kept")
    (root / "name").rename(root / "renamed")
    file.unlink()
    server = Server(root, "org/*")
    for _ in range(4):
        server.rescan()
        server.clock.now += 5
    for name in ("kept", "renamed"):
        found = server.catalog.get(name)
        assert found is not None
        assert (found.state, found.source) == (AdapterState.LISTED, f"hub:org/name@{COMMIT}")


def test_an_origin_that_somebody_wrote_cannot_forge_a_line(tmp_path: Path) -> None:
    record = '{"reference": {"repo": "org/name"}, "commit": "1\\nadapter \'x\' listed"}'
    (tmp_path / ".lora_plugin_origin.json").write_text(record)
    assert Origin.of(tmp_path) is None


def test_two_servers_of_one_directory(adapter: Repository, root: Path) -> None:
    refer(root)
    servers = [Server(root, "org/*") for _ in range(2)]
    for server in servers:
        server.rescan()
    versions = set()
    for server in servers:
        server.until_state(AdapterState.LISTED)
        versions.add(server.catalog.version_of("name").id)
    assert len(versions) == 1


def test_another_revision_takes_the_old_ones_place(hub: LocalHub, adapter: Repository, root: Path) -> None:
    server = Server(root, "org/*")
    refer(root)
    server.until_state(AdapterState.LISTED)
    before = server.catalog.version_of("name")
    adapter.files[WEIGHTS] = weight_bytes(seed=5)
    adapter.commit, adapter.revisions = OTHER, {"v2"}
    refer(root, "repo: org/name\nrevision: v2")

    def is_new(found: Adapter | None) -> bool:
        assert found is not None
        assert found.state is AdapterState.LISTED
        return found.source == f"hub:org/name@{OTHER}"

    server.until(is_new)
    assert server.catalog.version_of("name").digest != before.digest
    refer(root, "repo: org/name\nrevision: never")
    server.until(
        lambda found: found is not None and found.reason is not None and "never" in str(found.reason)
    )
    assert server.catalog.version_of("name").digest != before.digest


def test_an_update_replaces_every_file(tmp_path: Path) -> None:
    folder, draft = tmp_path / "folder", tmp_path / "draft"
    for path, names in ((folder, ("a", "old")), (draft, ("a", "new", ".lora_plugin_origin.json"))):
        path.mkdir()
        for name in names:
            (path / name).write_text(path.name)
    lora_plugin.hub.placing._put(draft, folder)
    assert {p.name: p.read_text() for p in folder.iterdir()} == dict.fromkeys(
        ("a", "new", ".lora_plugin_origin.json"), "draft"
    )


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("repo: other/name", Code.HUB_NOT_ALLOWED),
        ("repo: org/nothing", Code.HUB_NOT_FOUND),
        ("repo: org/name\nfolder: x", Code.HUB_REFERENCE_INVALID),
        ("repo: ../../etc/passwd", Code.HUB_REFERENCE_INVALID),
        ("repo: org/name\nsubfolder: ../x", Code.HUB_REFERENCE_INVALID),
        ("- a list", Code.HUB_REFERENCE_INVALID),
        ("repo: [", Code.HUB_REFERENCE_INVALID),
        ("", Code.HUB_REFERENCE_INVALID),
        ("[" * 5000, Code.HUB_REFERENCE_INVALID),
        ("a" * 100_000, Code.TOO_LARGE),
    ],
)
def test_refused_with_the_reason(adapter: Repository, root: Path, text: str, code: Code) -> None:
    server = Server(root, "org/*")
    refer(root, text)
    found = server.until_state(AdapterState.REJECTED)
    assert found.reason is not None
    assert found.reason.code is code
    refer(root)
    assert server.until_state(AdapterState.LISTED)


def test_nothing_is_fetched_unless_allowed(hub: LocalHub, adapter: Repository, root: Path) -> None:
    server = Server(root)
    refer(root)
    found = server.until_state(AdapterState.REJECTED)
    assert found.reason is not None
    assert found.reason.code is Code.HUB_NOT_ALLOWED
    assert not hub.seen


def test_names_are_checked_before_anything_is_fetched(hub: LocalHub, adapter: Repository, root: Path) -> None:
    server = Server(root, "org/*")
    for name in ("text", "two words"):
        refer(root, name=name)
        found = server.until(lambda found: found is not None and found.state is AdapterState.REJECTED, name)
        assert found is not None
        assert found.reason is not None
        assert found.reason.code in (Code.NAME_RESERVED, Code.NAME_INVALID)
    assert not hub.seen


def test_a_persons_folder_is_never_touched(hub: LocalHub, adapter: Repository, root: Path) -> None:
    server = Server(root, "org/*")
    write_adapter(root / "name", seed=9)
    mine = (root / "name" / WEIGHTS).read_bytes()
    file = refer(root)
    found = server.until_state(AdapterState.LISTED)
    assert any("not followed" in warning for warning in found.warnings)
    file.unlink()
    server.clock.now += 5
    server.rescan()
    assert server.until_state(AdapterState.LISTED)
    assert (root / "name" / WEIGHTS).read_bytes() == mine
    assert not hub.seen


def test_a_link_out_of_the_directory_is_not_read(adapter: Repository, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("repo: org/name")
    (root / "name.hub.yaml").symlink_to(secret)
    found = Server(root, "org/*").until_state(AdapterState.REJECTED)
    assert found.reason is not None
    assert found.reason.code is Code.PATH_ESCAPE


def test_a_kubernetes_config_map_is_followed(adapter: Repository, root: Path) -> None:
    volume = root / "..2026"
    volume.mkdir()
    refer(volume)
    (root / "..data").symlink_to("..2026")
    (root / "name.hub.yaml").symlink_to("..data/name.hub.yaml")
    assert Server(root, "org/*").until_state(AdapterState.LISTED)


def test_a_hub_that_comes_back_is_asked_again(hub: LocalHub, adapter: Repository, root: Path) -> None:
    server = Server(root, "org/*")
    hub.fail = 1000
    refer(root)
    server.until(
        lambda found: found is not None and found.reason is not None and "again" in str(found.reason)
    )
    hub.fail = 0
    server.rescan()
    assert server.get() is not None
    assert not (root / "name").exists()
    server.clock.now += 11
    assert server.until_state(AdapterState.LISTED)


def test_the_operator_can_ask_again(hub: LocalHub, adapter: Repository, root: Path) -> None:
    server = Server(root, "org/*")
    adapter.gated = True
    refer(root)
    server.until_state(AdapterState.REJECTED)
    adapter.gated = False
    server.catalog.reload("name")
    assert server.until_state(AdapterState.LISTED)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(adapter: Repository, root: Path) -> None:
    refer(root)
    root.chmod(0o555)
    try:
        Server(root, "org/*").until(lambda found: found is not None and "kept" in str(found.reason))
    finally:
        root.chmod(0o755)


@given(st.text(max_size=30))
def test_a_repository_is_never_a_path(text: str) -> None:
    if is_repo(text):
        assert text.count("/") == 1
        assert not any(part.startswith((".", "-")) or ".." in part for part in text.split("/"))


def test_a_name_is_no_way_to_a_reference_elsewhere(tmp_path: Path) -> None:
    """A client says it: the host's endpoints have the catalog look at any name."""
    root = tmp_path / "adapters"
    (root / "there").mkdir(parents=True)
    (tmp_path / "sql.hub.yaml").write_text("repo: org/sql")
    server = Server(root, "*")
    server.catalog.scan()
    server.catalog.scan(("there/../../sql.hub.yaml",))
    assert [adapter.name for adapter in server.catalog.list()] == ["there"]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_reference_or_refused(data: bytes) -> None:
    with contextlib.suppress(AdapterRejected):
        assert isinstance(parse_reference(data), HubReference)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("repos: a/b", "repo is missing [hub-reference-invalid]; expected a repository as organisation/name"),
        ("repo: a", "repo is not right [hub-reference-invalid]; expected a repository as organisation/name"),
        ("{repo: a/b, rev: x}", "rev is not right [hub-reference-invalid]; expected the fields repo"),
        ("{repo: a/b, revision: 1.2}", "revision is not right [hub-reference-invalid]; expected a text"),
        ("a/b", "the file is not right [hub-reference-invalid]; expected the fields repo"),
    ],
)
def test_a_bad_reference_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(AdapterRejected) as refusal:
        parse_reference(text.encode())
    assert words in str(refusal.value)


@given(st.from_regex(r"\w{1,9}/\w{1,9}", fullmatch=True), st.none() | st.just("a/b"))
def test_a_reference_is_written_as_it_is_read(repo: str, subfolder: str | None) -> None:
    if is_repo(repo):
        reference = HubReference(repo=repo, subfolder=subfolder)
        assert parse_reference(reference.dump()) == reference


@given(st.from_regex(r"[\w.-]{1,9}(/[\w.-]{1,9}){0,2}", fullmatch=True))
def test_a_repository_has_one_adapter_name(text: str) -> None:
    name = name_of(text)
    if is_repo(text):
        assert repo_of(name) == text
        assert "/" not in name
    else:
        assert name == text


def test_patterns() -> None:
    assert is_allowed("org/name", ["org/*"])
    assert is_allowed("org/name", ["x/y", "org/name"])
    assert not is_allowed("organisation/name", ["org/*"])
    assert not is_allowed("Org/name", ["org/*"])
    assert not is_allowed("org/name", [])
