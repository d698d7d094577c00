"""The host's `/metrics`, with the plugin's metrics after its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from vllm.v1.metrics.prometheus import get_prometheus_registry

from lora_plugin.service import Service


def attach_metrics(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Around `attach_router` of the host's instrumentator: its route stays, ours is found before it."""

    @functools.wraps(original)
    def function(app: Any) -> None:
        original(app)
        app.router.routes.insert(0, Route("/metrics", _metrics, include_in_schema=False))

    return function


async def _metrics(request: Request) -> Response:
    service: Service | None = getattr(request.app.state.engine_client, "lora_plugin_service", None)
    ours = b"" if service is None else await service.exposition()
    return Response(generate_latest(get_prometheus_registry()) + ours, media_type=CONTENT_TYPE_LATEST)
