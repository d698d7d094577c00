"""The host's `/metrics`, with the plugin's metrics after its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from vllm.v1.metrics.prometheus import get_prometheus_registry

from lora_plugin.hosts.vllm.adapter_requests import Corrected, Requests
from lora_plugin.hosts.vllm.server import service_of


def attach_metrics(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Around `attach_router` of the host's instrumentator: its route stays, ours is found before it."""

    @functools.wraps(original)
    def function(app: Any) -> None:
        original(app)
        app.router.routes.insert(0, Route("/metrics", _metrics, include_in_schema=False))

    return function


async def _metrics(request: Request) -> Response:
    service = service_of(request.app.state.engine_client)
    host: Collector = get_prometheus_registry()
    ours = b""
    if service is not None:
        requests: Requests = request.app.state.engine_client.lora_plugin_requests
        host, ours = Corrected(host, await requests.now()), await service.exposition()
    return Response(await run_in_threadpool(generate_latest, host) + ours, media_type=CONTENT_TYPE_LATEST)
