"""What somebody asks to have, by a path or a repository, is a folder of the directory or refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from catalog_samples import catalog_of, write_adapter
from hypothesis import given
from hypothesis import strategies as st

from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.entry import AdapterState
from lora_plugin.errors import AdapterNotFound, Code, LoraPluginError
from lora_plugin.hub.reference import HubReference, read_reference
from lora_plugin.settings import Settings
from lora_plugin.sources.arrivals import Arrivals


class Bench:
    """A directory and what makes adapters arrive there."""

    def __init__(self, root: Path, *allow: str) -> None:
        self.root = root
        settings = Settings(adapter_dir=root, settle_seconds=0.05, hub_allow=allow)
        self.catalog = catalog_of(settings, "base")
        self.catalog.scan()
        self.arrivals = Arrivals(self.catalog, settings, ("base",))

    async def bring(self, name: str, place: object) -> AdapterState:
        await self.arrivals.bring(name, str(place))
        await asyncio.wait_for(self.arrivals.settled(name), 5)
        found = self.catalog.get(name)
        assert found is not None
        return found.state

    async def refusal(self, name: str, place: object) -> Code:
        with pytest.raises(LoraPluginError) as error:
            await self.bring(name, place)
        return error.value.code


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    folder.mkdir()
    return folder


async def test_a_folder_by_its_path(root: Path) -> None:
    write_adapter(root / "poet")
    bench = Bench(root)
    for place in (root / "poet", "poet", f"{root}/x/../poet/", "./poet"):
        assert await bench.bring("poet", place) is AdapterState.LISTED


async def test_a_folder_of_another_name_becomes_a_link(root: Path) -> None:
    write_adapter(root / "poet", seed=1)
    write_adapter(root / "shelf" / "deep", seed=2)
    bench = Bench(root)
    for name, place in (("verse", root / "poet"), ("prose", root / "shelf" / "deep")):
        for _ in range(2):
            assert await bench.bring(name, place) is AdapterState.LISTED
        assert not (root / name).readlink().is_absolute()
    digests = {name: bench.catalog.version_of(name).digest for name in ("poet", "verse", "prose")}
    assert digests["poet"] == digests["verse"] != digests["prose"]
    assert await bench.refusal("verse", root / "shelf" / "deep") is Code.BAD_REQUEST
    assert await bench.refusal("poet", root / "shelf" / "deep") is Code.BAD_REQUEST


async def test_nothing_outside_is_reached(root: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "outside")
    (root / "way").symlink_to(tmp_path)
    write_adapter(root / ".lora_plugin" / "incoming" / "half")
    bench = Bench(root)
    for place in (
        tmp_path / "outside",
        root / ".." / "outside",
        root / "way" / "outside",
        root,
        "..",
        ".",
        "/",
        "/etc",
        "no-such-folder",
        root / ".lora_plugin" / "incoming" / "half",
        "poet\0",
        "a" * 300,
        root / ("a/" * 3000),
    ):
        assert await bench.refusal("poet", place) is Code.NOT_FOUND, place
    assert not (root / "poet").exists()


@given(st.text(max_size=20))
def test_any_words_are_no_way_out(text: str) -> None:
    settings = Settings(adapter_dir="/nowhere/adapters")
    bench = Arrivals(catalog_of(settings), settings, ())
    assert bench._find(text) is None


async def test_names_are_checked(root: Path) -> None:
    write_adapter(root / "poet")
    bench = Bench(root, "*")
    assert await bench.refusal("base", root / "poet") is Code.NAME_RESERVED
    assert await bench.refusal("a/b", root / "poet") is Code.NAME_INVALID
    assert await bench.refusal("../x", "org/name") is Code.NAME_INVALID


async def test_a_repository_becomes_a_reference(root: Path) -> None:
    bench = Bench(root, "org/*")
    assert await bench.refusal("poet", "other/name") is Code.HUB_NOT_ALLOWED
    assert not (root / "poet.hub.yaml").exists()
    await bench.arrivals.bring("poet", "org/name")
    assert read_reference(root, "poet") == HubReference(repo="org/name")
    assert bench.catalog.get("poet") is not None
    write_adapter(root / "mine")
    assert await bench.refusal("mine", "org/name") is Code.BAD_REQUEST


async def test_what_another_server_just_put_there_is_seen(root: Path) -> None:
    bench, other = Bench(root), Bench(root)
    write_adapter(root / "poet")
    await bench.arrivals.look("poet")
    assert bench.catalog.find("poet")
    await other.arrivals.look("poet")
    other.catalog.unload("poet")
    bench.catalog.scan(())
    with pytest.raises(AdapterNotFound):
        bench.catalog.find("poet")
    other.catalog.reload("poet")
    await bench.arrivals.look("poet")
    assert bench.catalog.find("poet")


async def test_many_requests_ask_as_one_whether_a_copy_is_done(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, requests, scan, scans = Bench(root), 200, Catalog.scan, []
    bench.arrivals._patience = 30.0

    def counted(self: Catalog, names: Iterable[str] | None = None) -> float | None:
        scans.append(names)
        return scan(self, names)

    monkeypatch.setattr(Catalog, "scan", counted)
    (root / "poet").mkdir()
    waiting = asyncio.gather(*(bench.arrivals.look("poet") for _ in range(requests)))
    while len(scans) <= requests:
        await asyncio.sleep(0.01)
    write_adapter(root / "poet")
    await asyncio.to_thread(bench.catalog.scan, ("poet",))
    await waiting
    assert bench.catalog.find("poet")
    # One for each, and those of one waiting.
    assert len(scans) < 1.5 * requests


async def test_a_long_copy_is_not_waited_for(root: Path) -> None:
    bench = Bench(root)
    (root / "poet").mkdir()
    started = time.monotonic()
    await bench.arrivals.look("poet")
    assert time.monotonic() - started < 4
    found = bench.catalog.get("poet")
    assert found is not None
    assert found.state is AdapterState.SETTLING
