"""The one route table: the router is built from it, and so is every list of the routes."""

from __future__ import annotations

from aiohttp import web

import lora_plugin
from lora_plugin.admin import handlers, page
from lora_plugin.admin.event_stream import EventStream
from lora_plugin.admin.explanation import ExplanationView
from lora_plugin.admin.models import (
    AdapterPage,
    AdapterView,
    ConfigView,
    HealthView,
    IndexView,
    LoadBody,
    PoolView,
    RouteView,
    RoutingView,
)
from lora_plugin.admin.openapi import document
from lora_plugin.admin.queries import EventsQuery, ListQuery, LoadQuery, UnloadQuery
from lora_plugin.admin.table import Route

EVENTS: web.AppKey[EventStream] = web.AppKey("events", EventStream)


async def index(_: web.Request) -> IndexView:
    """The routes."""
    lines = [RouteView(method=r.method, path=r.path, summary=r.summary) for r in ROUTES]
    return IndexView(version=lora_plugin.__version__, routes=tuple(lines))


async def openapi(_: web.Request) -> web.Response:
    """The description of all routes for programs."""
    return web.json_response(document(ROUTES))


async def events(request: web.Request) -> web.StreamResponse:
    """What happens to adapters, as it happens."""
    return await request.app[EVENTS].respond(request)


_ADAPTER = "/v1/adapters/{name}"

ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        "/",
        "page",
        page.file("index.html", "text/html"),
        None,
        "a page for people; the page itself needs no token, what it shows does",
        content_type="text/html",
        public=True,
    ),
    Route(
        "GET",
        "/page.css",
        "page_style",
        page.file("page.css", "text/css"),
        None,
        "its style",
        content_type="text/css",
        public=True,
    ),
    Route(
        "GET",
        "/page.js",
        "page_script",
        page.file("page.js", "text/javascript"),
        None,
        "its script",
        content_type="text/javascript",
        public=True,
    ),
    Route("GET", "/v1", "index", index, IndexView, "the routes"),
    Route(
        "GET",
        "/health",
        "health",
        handlers.health,
        HealthView,
        "200 once the first scan of the directory is done, else 503; needs no token",
        public=True,
    ),
    Route(
        "GET",
        "/v1/adapters",
        "list_adapters",
        handlers.list_adapters,
        AdapterPage,
        "the adapters, by state and part of the name, in pages",
        query=ListQuery,
    ),
    Route("GET", _ADAPTER, "show_adapter", handlers.show_adapter, AdapterView, "one adapter"),
    Route(
        "GET",
        f"{_ADAPTER}/explain",
        "explain_adapter",
        handlers.explain_adapter,
        ExplanationView,
        "why it may have no effect, be slow, or answer like another; also of aliases and compositions",
    ),
    Route(
        "PUT",
        _ADAPTER,
        "load_adapter",
        handlers.load_adapter,
        AdapterView,
        "load it into host memory now: 200 it was, 201 it is, 202 it is being loaded",
        query=LoadQuery,
        body=LoadBody,
        statuses=(200, 201, 202),
    ),
    Route(
        "POST",
        f"{_ADAPTER}/reload",
        "reload_adapter",
        handlers.change(lambda operations, name: operations.reload(name)),
        AdapterView,
        "look at its files again, also after it was unloaded or refused",
    ),
    Route(
        "POST",
        f"{_ADAPTER}/evict",
        "evict_adapter",
        handlers.change(lambda operations, name: operations.evict(name)),
        AdapterView,
        "take it out of device and host memory; the next request loads it again",
    ),
    Route(
        "POST",
        f"{_ADAPTER}/pin",
        "pin_adapter",
        handlers.change(lambda operations, name: operations.pin(name)),
        AdapterView,
        "keep it on the device",
    ),
    Route(
        "POST",
        f"{_ADAPTER}/unpin",
        "unpin_adapter",
        handlers.change(lambda operations, name: operations.unpin(name)),
        AdapterView,
        "let it be evicted again",
    ),
    Route(
        "DELETE",
        _ADAPTER,
        "unload_adapter",
        handlers.unload_adapter,
        AdapterView,
        "stop serving it until its files change; the files stay",
        query=UnloadQuery,
    ),
    Route("GET", "/v1/pool", "show_pool", handlers.show_pool, PoolView, "slabs, extents and host memory"),
    Route(
        "GET",
        "/v1/routing",
        "show_routing",
        handlers.show_routing,
        RoutingView,
        "aliases and compositions, and what is wrong with their files",
    ),
    Route(
        "GET",
        "/v1/events",
        "follow_events",
        events,
        None,
        "what happens to adapters, as server-sent events",
        query=EventsQuery,
        content_type="text/event-stream",
    ),
    Route("GET", "/v1/config", "show_config", handlers.show_config, ConfigView, "the settings in force"),
    Route("GET", "/openapi.json", "openapi", openapi, None, "this table as OpenAPI 3.1"),
    Route(
        "GET",
        "/metrics",
        "metrics",
        handlers.metrics,
        None,
        "Prometheus metrics",
        content_type="text/plain",
    ),
)

PUBLIC_PATHS = frozenset(route.path for route in ROUTES if route.public)


def route_definitions() -> list[web.RouteDef]:
    """The table in aiohttp's form."""
    return [web.route(route.method, route.path, route.handler()) for route in ROUTES]
