"""The example plugins do what they say, and are short."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from catalog_samples import catalog_of, write_adapter
from memory_operations import MemoryOperations

from lora_plugin.admin.app import create_app
from lora_plugin.errors import AdapterNotFound, SettingsError
from lora_plugin.extensions.loading import load_hooks
from lora_plugin.extensions.metrics import export_plugins
from lora_plugin.hooks import Adapter, Refusal, Request
from lora_plugin.hooks.manager import HookManager
from lora_plugin.metrics import Metrics
from lora_plugin.settings import Settings
from lora_plugin.sources.requested import RequestedAdapters

EXAMPLES = Path(__file__).parents[2] / "examples" / "hooks"
NAMES = [path.stem for path in EXAMPLES.glob("*.py")]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A watched directory; the examples can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


def load(root: Path, name: str) -> HookManager:
    return load_hooks(Settings(adapter_dir=root, hooks=name))


@pytest.mark.parametrize("name", NAMES)
def test_they_are_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_tenants(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = root / "tenants.json"
    monkeypatch.setenv("TENANTS", str(file))
    with pytest.raises(SettingsError, match="'tenants' cannot be imported"):
        load(root, "tenants")
    file.write_text(json.dumps({"sk-red": ["red-*"], "sk-all": ["*"]}))
    hooks = load(root, "tenants")

    def ask(adapter: str, authorization: str) -> int | None:
        refusal = hooks.authorize(Request(adapter, headers={"authorization": authorization}), adapter)
        return refusal.status if isinstance(refusal, Refusal) else None

    assert ask("red-1", "Bearer sk-red") is None
    assert ask("blue-1", "Bearer sk-red") == 404
    assert ask("blue-1", "Bearer sk-all") is None
    assert [ask("red-1", words) for words in ("", "Bearer ", "Bearer sk-blue", "sk-red")] == [401] * 4


async def test_store(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, watched = root / "store", root / "watched"
    watched.mkdir()
    write_adapter(store / "poet")
    (store / "poet" / "optimizer.pt").write_bytes(b"a pickle")
    monkeypatch.setenv("LORA_STORE", str(store))
    settings = Settings(adapter_dir=watched, hooks="store", settle_seconds=0.01)
    catalog = catalog_of(settings)
    requested = RequestedAdapters(catalog, load_hooks(settings), settings)
    await requested.ensure("poet")
    assert catalog.find("poet").rank == 4
    assert not (watched / "poet" / "optimizer.pt").exists()
    with pytest.raises(AdapterNotFound):
        await requested.ensure("nobody")


async def test_counts(root: Path) -> None:
    hooks, metrics = load(root, "counts"), Metrics()
    export_plugins(hooks, metrics.registry)
    hooks.adapter_ready(Adapter("poet"))
    for name in ("poet", "poet", "made-up"):
        assert hooks.authorize(Request(name), name) is None
    app = create_app(MemoryOperations(), metrics=metrics, plugin_routes=hooks.admin_routes())
    async with TestClient(TestServer(app)) as client:
        assert await (await client.get("/x/counts")).json() == {"poet": 2}
        text = await (await client.get("/metrics")).text()
    assert 'adapter_uses_total{adapter="poet"} 2.0' in text
    assert "made-up" not in text
    assert importlib.import_module("counts").served == {"poet"}
    hooks.adapter_retired(Adapter("poet"))
    assert hooks.failures == {}
