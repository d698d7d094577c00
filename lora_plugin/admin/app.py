"""The admin application: routes, operations and middlewares put together."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from lora_plugin.admin.handlers import METRICS, OPERATIONS
from lora_plugin.admin.middlewares import bearer, limit_body, log_changes, request_id
from lora_plugin.admin.operations import Operations
from lora_plugin.admin.problems import problems
from lora_plugin.admin.routes import PUBLIC_PATHS, route_definitions
from lora_plugin.metrics import Metrics

MAX_BODY_BYTES = 64 * 1024


def create_app(
    operations: Operations,
    *,
    token: str | None = None,
    metrics: Metrics | None = None,
    middlewares: Sequence[Middleware] = (),
) -> web.Application:
    """The application for `operations`, to be run on one event loop.

    `token`: asked for as a bearer token on every route that is not public; None: no token is needed.
    `metrics`: what `GET /metrics` shows; None: a registry of the application's own.
    `middlewares`: run before the token is checked; what they raise becomes a problem document too.
    """
    guard = [] if token is None else [bearer(token, PUBLIC_PATHS)]
    app = web.Application(
        client_max_size=MAX_BODY_BYTES,
        middlewares=[request_id, log_changes, problems, *middlewares, *guard, limit_body],
    )
    app[OPERATIONS] = operations
    app[METRICS] = Metrics() if metrics is None else metrics
    app.add_routes(route_definitions())
    return app
