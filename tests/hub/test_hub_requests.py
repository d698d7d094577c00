"""A request for a repository fetches it, once, if the operator allows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from catalog_samples import CONFIG, WEIGHTS, catalog_of, config_bytes, weight_bytes
from local_hub import COMMIT, LocalHub, Repository

from lora_plugin.errors import AdapterNotFound, AdapterRejected, Code, LoraPluginError
from lora_plugin.extensions.loading import load_hooks
from lora_plugin.hub.reference import name_of
from lora_plugin.settings import Settings
from lora_plugin.sources.requested import RequestedAdapters


class Server:
    """What an API server has for names that its catalog does not know."""

    def __init__(self, root: Path, **settings: object) -> None:
        given = Settings(adapter_dir=root, settle_seconds=0.01, **settings)
        self.catalog = catalog_of(given, "base")
        self.requested = RequestedAdapters(self.catalog, load_hooks(given), given)

    async def error(self, name: str) -> LoraPluginError:
        with pytest.raises(LoraPluginError) as caught:
            await self.requested.ensure(name)
        return caught.value


@pytest.fixture
def adapter(hub: LocalHub) -> Repository:
    files = {CONFIG: config_bytes(), WEIGHTS: weight_bytes()}
    return hub.repositories.setdefault("org/name", Repository(files))


async def test_it_is_fetched_once_and_stays(hub: LocalHub, adapter: Repository, tmp_path: Path) -> None:
    server = Server(tmp_path, hub_allow=("org/*",))
    name = name_of("org/name")
    await asyncio.gather(*(server.requested.ensure(name) for _ in range(5)))
    assert server.catalog.find(name).source == f"hub:org/name@{COMMIT}"
    assert hub.seen[f"GET /org/name/resolve/{COMMIT}/{WEIGHTS}"] == 1
    again = Server(tmp_path)
    again.catalog.scan()
    await asyncio.sleep(0.05)
    again.catalog.scan()
    assert again.catalog.find(name)


async def test_what_is_not_there_is_unknown(hub: LocalHub, adapter: Repository, tmp_path: Path) -> None:
    server = Server(tmp_path, hub_allow=("org/*",))
    for name in ("org--nothing", "other--name", "org--name--x", "name", "--", "org--"):
        assert isinstance(await server.error(name), AdapterNotFound), name
    assert not any("other" in key for key in hub.seen)


async def test_what_may_not_be_had_says_why(adapter: Repository, tmp_path: Path) -> None:
    adapter.gated = True
    error = await Server(tmp_path, hub_allow=("org/*",)).error("org--name")
    assert isinstance(error, AdapterRejected)
    assert error.code is Code.HUB_FORBIDDEN


@pytest.mark.parametrize("settings", [{}, {"hub_allow": ("org/*",), "hooks_block": ("hub",)}])
async def test_switched_off_nobody_is_asked(
    hub: LocalHub, adapter: Repository, tmp_path: Path, settings: dict[str, object]
) -> None:
    server = Server(tmp_path, **settings)
    await server.requested.ensure("org--name")
    with pytest.raises(AdapterNotFound):
        server.catalog.find("org--name")
    assert not hub.seen
