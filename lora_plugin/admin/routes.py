"""The one route table: the router is built from it, and so is every list of the routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel

import lora_plugin
from lora_plugin.admin import handlers
from lora_plugin.admin.models import AdapterPage, AdapterView, HealthView, IndexView, PoolView, RouteView

Respond = Callable[[web.Request], Awaitable[BaseModel | web.Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """One route.

    Attributes:
        method: the HTTP method.
        path: the path, with `{name}` for an adapter's name.
        operation: a unique name, for clients made from the table.
        respond: from the request to the response model (or a ready response).
        model: the response model; None where the body is not JSON.
        summary: one line for people.
        query: the model of the query string, if there is one.
        public: answered without a token.
    """

    method: str
    path: str
    operation: str
    respond: Respond
    model: type[BaseModel] | None
    summary: str
    query: type[BaseModel] | None = None
    public: bool = False


async def index(_: web.Request) -> IndexView:
    """The routes, as the endpoint's own first page."""
    lines = [RouteView(method=r.method, path=r.path, summary=r.summary) for r in ROUTES]
    return IndexView(version=lora_plugin.__version__, routes=tuple(lines))


_ADAPTER = "/v1/adapters/{name}"

ROUTES: tuple[Route, ...] = (
    Route("GET", "/", "index", index, IndexView, "the routes"),
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
        query=handlers.ListQuery,
    ),
    Route("GET", _ADAPTER, "show_adapter", handlers.show_adapter, AdapterView, "one adapter"),
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
        handlers.change(lambda operations, name: operations.unload(name)),
        AdapterView,
        "stop serving it until its files change; the files stay",
    ),
    Route("GET", "/v1/pool", "show_pool", handlers.show_pool, PoolView, "slabs, extents and host memory"),
    Route("GET", "/metrics", "metrics", handlers.metrics, None, "Prometheus metrics"),
)

PUBLIC_PATHS = frozenset(route.path for route in ROUTES if route.public)


def route_definitions() -> list[web.RouteDef]:
    """The table in aiohttp's form."""
    return [web.route(route.method, route.path, _as_json(route.respond)) for route in ROUTES]


def _as_json(respond: Respond) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        answer = await respond(request)
        if isinstance(answer, web.Response):
            return answer
        return web.Response(text=answer.model_dump_json(), content_type="application/json")

    return handle
