"""The admin application: routes, operations and middlewares put together."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from lora_plugin.admin.callers import GuessLimit, Tokens
from lora_plugin.admin.event_stream import EventStream
from lora_plugin.admin.guards import authenticate, known_hosts, limit_body
from lora_plugin.admin.handlers import METRICS, OPERATIONS
from lora_plugin.admin.middlewares import log_changes, request_id
from lora_plugin.admin.operations import Operations
from lora_plugin.admin.problems import problems
from lora_plugin.admin.routes import EVENTS, PUBLIC_PATHS, route_definitions
from lora_plugin.directory.events import EventLog
from lora_plugin.metrics import Metrics

_log = logging.getLogger("lora_plugin.admin")

MAX_BODY_BYTES = 64 * 1024


def create_app(
    operations: Operations,
    *,
    tokens: Tokens | None = None,
    allowed_hosts: Collection[str] = (),
    metrics: Metrics | None = None,
    events: EventLog | None = None,
    plugin_routes: Sequence[tuple[str, web.RouteDef]] = (),
    middlewares: Sequence[Middleware] = (),
) -> web.Application:
    """The application for `operations`, to be run on one event loop.

    `tokens`: asked for as bearer tokens on every route that is not public; None: no token is needed.
    `allowed_hosts`: names in a Host header that are accepted besides localhost and IP addresses.
    `metrics`: what `GET /metrics` shows; None: a registry of the application's own.
    `events`: what `GET /v1/events` follows; None: a log in which nothing happens.
    `plugin_routes`: plugins' names and routes; one that does not fit is left out, and said so.
    `middlewares`: run before the token is checked; what they raise becomes a problem document too.
    """
    guards = [
        known_hosts(allowed_hosts),
        *middlewares,
        authenticate(tokens or Tokens(), PUBLIC_PATHS, GuessLimit()),
        limit_body,
    ]
    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=[request_id, log_changes, problems, *guards]
    )
    app[OPERATIONS] = operations
    app[METRICS] = Metrics() if metrics is None else metrics
    app[EVENTS] = EventStream(EventLog() if events is None else events)
    app.add_routes(route_definitions())
    for plugin, route in plugin_routes:
        _add(app, plugin, route)
    return app


def _add(app: web.Application, plugin: str, route: web.RouteDef) -> None:
    try:
        app.add_routes([route])
    except Exception as error:
        _log.warning("plugin %r: its route %s %s is left out: %s", plugin, route.method, route.path, error)
