"""The host's `/metrics`: its own application with its own instrumentator, and what the plugin adds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY, Gauge
from prometheus_client.parser import text_string_to_metric_families as parse
from starlette.testclient import TestClient
from vllm.entrypoints.serve.instrumentator.metrics import attach_router

from lora_plugin.errors import Code
from lora_plugin.hosts.vllm.adapter_requests import NAME, Requests
from lora_plugin.hosts.vllm.host_metrics import attach_metrics
from lora_plugin.metrics import Metrics, render


class Service:
    """As far as the route asks it."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.metrics.count_refusal(Code.NOT_READY)

    async def exposition(self) -> bytes:
        return render(self.metrics.registry, with_summed=False)[0]


class Link:
    """Two engines, of which each knows its own requests; or none that answers."""

    answers = True

    async def adapter_requests(self) -> list[dict[str, Any]]:
        if not self.answers:
            raise ConnectionError
        return [
            {"running": ["sql"], "waiting": [], "slabs": 4},
            {"running": ["poet", "sql"], "waiting": ["late"], "slabs": 4},
        ]


def _families(app: FastAPI) -> dict[str, Any]:
    response = TestClient(app).get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    families = list(parse(response.text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


@pytest.fixture
def app() -> FastAPI:
    app = FastAPI()
    # The function that the host has, whether or not it is patched in this process.
    attach_metrics(getattr(attach_router, "__wrapped__", attach_router))(app)
    app.state.engine_client = SimpleNamespace()
    return app


def test_the_plugins_metrics_follow_the_hosts(app: FastAPI) -> None:
    app.state.engine_client.lora_plugin_service = Service()
    app.state.engine_client.lora_plugin_requests = Requests(Link())  # type: ignore[arg-type]
    families = _families(app)
    assert "process_cpu_seconds" in families
    assert families["lora_plugin_refused_requests"].samples[0].value == 1
    assert families["lora_plugin_up"].samples[0].value == 0


def test_where_the_plugin_is_off_the_hosts_are_all(app: FastAPI) -> None:
    families = _families(app)
    assert "process_cpu_seconds" in families
    assert not any(name.startswith("lora_plugin") for name in families)


def test_the_hosts_gauge_is_replaced_by_what_the_engines_say(app: FastAPI) -> None:
    link = Link()
    app.state.engine_client.lora_plugin_service = Service()
    app.state.engine_client.lora_plugin_requests = Requests(link)  # type: ignore[arg-type]
    gauge = Gauge(NAME, "The host's.", ["running_lora_adapters"])
    try:
        gauge.labels("gone").set(1e12)
        for link.answers in (True, False):
            (sample,) = _families(app)[NAME].samples
            assert sample.labels == {
                "max_lora": "4",
                "running_lora_adapters": "poet,sql",
                "waiting_lora_adapters": "late",
            }
    finally:
        REGISTRY.unregister(gauge)
