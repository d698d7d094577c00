"""Requests per adapter: as the metric `adapter_uses_total`, and at `/x/counts` of the admin endpoint.

    export LORA_PLUGIN_HOOKS=counts PYTHONPATH=examples/hooks

With several API servers each counts its own; the endpoint is the first one's.
"""

from __future__ import annotations

from collections import Counter

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Metric

from lora_plugin.hooks import Adapter, hookimpl

uses: Counter[str] = Counter()
served: set[str] = set()
metric = Metric("adapter_uses", "Requests that named an adapter", ["adapter"], registry=None)


@hookimpl
def adapter_ready(adapter: Adapter) -> None:
    served.add(adapter.name)


@hookimpl
def adapter_retired(adapter: Adapter) -> None:
    served.discard(adapter.name)


@hookimpl
def authorize(adapter: str) -> None:
    """Called for every request that names an adapter; refuses none."""
    # A client can name anything: only what is served gets a series of its own.
    if adapter in served:
        uses[adapter] += 1
        metric.labels(adapter).inc()


@hookimpl
def register_metrics(registry: CollectorRegistry) -> None:
    registry.register(metric)


@hookimpl
def admin_routes() -> list[web.RouteDef]:
    async def counts(request: web.Request) -> web.Response:
        return web.json_response(dict(uses.most_common()))

    return [web.get("/x/counts", counts)]
