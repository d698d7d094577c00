"""Plugins' metrics and routes on the admin endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hook_samples import plugin
from memory_operations import MemoryOperations
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lora_plugin.admin.app import create_app
from lora_plugin.admin.callers import Tokens
from lora_plugin.extensions.metrics import export_plugins
from lora_plugin.hooks.manager import HookManager
from lora_plugin.metrics import Metrics, render


async def _hello(request: web.Request) -> web.Response:
    return web.json_response({"hello": request.match_info["name"]})


async def _fails(request: web.Request) -> web.Response:
    raise RuntimeError("token=secret")


async def _nothing(request: web.Request) -> Any:
    return None


def routes() -> HookManager:
    def admin_routes() -> list[Any]:
        return [
            web.get("/x/hello/{name}", _hello),
            web.get("/x/hello/{name}", _hello),
            web.post("/x/fails", _fails),
            web.get("/x/nothing", _nothing),
            web.get("/x/{bad", _hello),
            web.get("/metrics", _hello),
            "not a route",
        ]

    return HookManager([plugin("greeter", admin_routes)])


@pytest.fixture
async def client() -> AsyncIterator[TestClient]:
    app = create_app(MemoryOperations(), tokens=Tokens("word"), plugin_routes=routes().admin_routes())
    async with TestClient(TestServer(app), headers={"Authorization": "Bearer word"}) as client:
        yield client


async def test_a_route_is_there_behind_the_token(client: TestClient) -> None:
    response = await client.get("/x/hello/poet")
    assert (response.status, await response.json()) == (200, {"hello": "poet"})
    refused = await client.get("/x/hello/poet", headers={"Authorization": "Bearer other"})
    assert refused.status == 401


async def test_those_that_do_not_fit_are_left_out(client: TestClient) -> None:
    assert "hello" not in await (await client.get("/metrics")).text()
    assert (await client.get("/x/bad")).status == 404


@pytest.mark.parametrize(("method", "path"), [("POST", "/x/fails"), ("GET", "/x/nothing")])
async def test_a_handler_that_fails_answers_500_without_its_words(
    client: TestClient, method: str, path: str
) -> None:
    response = await client.request(method, path)
    assert response.status == 500
    assert "secret" not in await response.text()
    assert (await client.get("/x/hello/poet")).status == 200


class _Failing(Collector):
    def __init__(self) -> None:
        self.fails = False

    def collect(self) -> Iterator[Metric]:
        if self.fails:
            raise RuntimeError("boom")
        return iter(())


def test_plugins_metrics_are_exported_and_fail_alone() -> None:
    failing = _Failing()

    def register_metrics(registry: CollectorRegistry) -> None:
        Counter("greetings", "Greetings", registry=registry).inc(3)
        registry.register(failing)

    def ours(registry: CollectorRegistry) -> None:
        Counter("lora_plugin_up", "Not ours", registry=registry)

    def taken(registry: CollectorRegistry) -> None:
        Counter("greetings", "Not the first", registry=registry)

    def raises(registry: CollectorRegistry) -> None:
        Counter("half_done", "Half done", registry=registry)
        raise RuntimeError("boom")

    ours.__name__ = taken.__name__ = raises.__name__ = "register_metrics"
    hooks = HookManager(
        [plugin("a", register_metrics), plugin("b", ours), plugin("c", raises), plugin("d", taken)]
    )
    metrics = Metrics()
    export_plugins(hooks, metrics.registry)
    text = render(metrics.registry)[0].decode()
    assert "greetings_total 3.0" in text
    assert "Not" not in text
    assert 'lora_plugin_hook_failures_total{hook="register_metrics",plugin="c"} 1.0' in text
    failing.fails = True
    text = render(metrics.registry)[0].decode()
    assert "greetings" not in text
    assert "lora_plugin_up" in text
    assert 'plugin="a"} 1.0' in render(metrics.registry)[0].decode()
