"""The operator's routes over a real service and a real pool."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from real_service import serving

sys.path.append(str(Path(__file__).parents[1] / "catalog"))

from catalog_samples import LAYOUT, write_adapter


class Endpoint:
    """What a client sees."""

    def __init__(self, url: str, root: Path) -> None:
        self.url, self.root = url, root

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data, method=method), timeout=30) as response:
                return response.status, json.load(response)
        except HTTPError as error:
            return error.code, json.load(error)

    def until(self, path: str, field: str, value: object) -> None:
        deadline = time.monotonic() + 20
        while (seen := self.ask("GET", path)[1].get(field)) != value:
            assert time.monotonic() < deadline, seen
            time.sleep(0.02)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    root = tmp_path / "adapters"
    write_adapter(root / "sql", seed=1)
    with serving(root, LAYOUT) as url:
        yield Endpoint(url, root)


def test_load_evict_unload_reload(endpoint: Endpoint) -> None:
    status, view = endpoint.ask("PUT", "/v1/adapters/sql?wait=20")
    assert (status, view["residency"]["host"]) == (201, 1)
    assert endpoint.ask("PUT", "/v1/adapters/sql")[0] == 200
    assert endpoint.ask("POST", "/v1/adapters/sql/evict")[1]["residency"]["host"] == 0
    assert endpoint.ask("PUT", "/v1/adapters/sql?wait=20")[0] == 201
    assert endpoint.ask("DELETE", "/v1/adapters/sql?drain=abort")[1]["state"] == "unloaded"
    assert endpoint.ask("GET", "/v1/adapters?state=unloaded")[1]["total"] == 1
    assert endpoint.ask("POST", "/v1/adapters/sql/reload")[1]["state"] == "listed"
    assert endpoint.ask("DELETE", "/v1/adapters/sql")[0] == 200
    status, view = endpoint.ask("PUT", "/v1/adapters/sql?wait=20")
    assert (status, view["state"]) == (201, "listed")


def test_pinned_in_use_and_unknown_are_told_apart(endpoint: Endpoint) -> None:
    assert endpoint.ask("POST", "/v1/adapters/sql/pin")[1]["pinned"] is True
    status, problem = endpoint.ask("POST", "/v1/adapters/sql/evict")
    assert (status, problem["code"]) == (409, "pinned")
    assert endpoint.ask("POST", "/v1/adapters/sql/unpin")[1]["pinned"] is False
    assert endpoint.ask("POST", "/v1/adapters/sql/evict")[0] == 200
    status, problem = endpoint.ask("PUT", "/v1/adapters/none")
    assert (status, problem["code"]) == (404, "not-found")


def test_a_refused_folder_is_loaded_once_it_is_mended(endpoint: Endpoint) -> None:
    folder = endpoint.root / "late"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    (folder / "adapter_model.safetensors").write_bytes(b"")
    endpoint.until("/v1/adapters/late", "state", "rejected")
    status, problem = endpoint.ask("PUT", "/v1/adapters/late?wait=20")
    assert (status, problem["code"]) == (400, "peft-type-unsupported")
    write_adapter(folder, seed=2)
    endpoint.until("/v1/adapters/late", "state", "listed")
    assert endpoint.ask("PUT", "/v1/adapters/late?wait=20")[0] in (200, 201)


def test_sources_are_asked_for_leave(endpoint: Endpoint) -> None:
    source = {"source": {"hub": "org/repo"}}
    status, problem = endpoint.ask("PUT", "/v1/adapters/new", source)
    assert (status, problem["code"]) == (403, "hub-not-allowed")
    status, problem = endpoint.ask(
        "PUT", "/v1/adapters/new", {"source": {"hub": "org/repo", "revision": "../x"}}
    )
    assert (status, problem["code"]) == (422, "body-invalid")
    status, problem = endpoint.ask("PUT", "/v1/adapters/base", source)
    assert (status, problem["code"]) == (409, "name-reserved")
    assert [path.name for path in endpoint.root.iterdir() if not path.name.startswith(".")] == ["sql"]


def test_events_and_metrics_follow(endpoint: Endpoint) -> None:
    endpoint.ask("DELETE", "/v1/adapters/sql")
    with urlopen(f"{endpoint.url}/v1/events?after=0", timeout=30) as stream:
        lines = [stream.readline().decode() for _ in range(14)]
    kinds = [line.split()[1] for line in lines if line.startswith("event:")]
    assert kinds[:3] == ["discovered", "listed", "unloaded"]
    with urlopen(f"{endpoint.url}/metrics", timeout=30) as response:
        text = response.read().decode()
    assert 'lora_plugin_adapters{state="unloaded"} 1.0' in text
    assert "lora_plugin_up 1.0" in text


def test_config_is_that_of_the_process(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_PLUGIN_ADAPTER_DIR", str(endpoint.root))
    monkeypatch.setenv("LORA_PLUGIN_ADMIN_TOKEN", "s3cret")
    rows = {row["variable"]: row for row in endpoint.ask("GET", "/v1/config")[1]["settings"]}
    assert rows["LORA_PLUGIN_ADAPTER_DIR"]["source"] == "LORA_PLUGIN_ADAPTER_DIR"
    assert rows["LORA_PLUGIN_ADMIN_TOKEN"]["value"] == "****"
