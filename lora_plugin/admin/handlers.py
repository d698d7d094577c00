"""One function per route: from the request to the operation to the response model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from aiohttp import hdrs, web
from pydantic import BaseModel

from lora_plugin.admin.explanation import ExplanationView
from lora_plugin.admin.inputs import parse_body, parse_query
from lora_plugin.admin.models import (
    AdapterPage,
    AdapterView,
    ConfigView,
    HealthView,
    LoadBody,
    PoolView,
    RoutingView,
)
from lora_plugin.admin.operations import Operations
from lora_plugin.admin.queries import ListQuery, LoadQuery, UnloadQuery
from lora_plugin.errors import Code, Unavailable
from lora_plugin.metrics import Metrics, render
from lora_plugin.readiness.loads import LoadOutcome

OPERATIONS: web.AppKey[Operations] = web.AppKey("operations")
METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)

AdapterHandler = Callable[[web.Request], Awaitable[AdapterView]]


async def health(request: web.Request) -> HealthView:
    """Raises Unavailable until the first scan is done."""
    if not await request.app[OPERATIONS].ready():
        raise Unavailable(Code.NOT_READY, "The first scan of the adapter directory is not finished")
    return HealthView()


async def list_adapters(request: web.Request) -> AdapterPage:
    """Raises BadRequest for unknown or malformed filters."""
    query = parse_query(request, ListQuery)
    found = query.select(await request.app[OPERATIONS].adapters())
    page = found[query.offset : query.offset + query.limit]
    return AdapterPage(adapters=tuple(page), total=len(found), offset=query.offset, limit=query.limit)


async def show_adapter(request: web.Request) -> AdapterView:
    return await request.app[OPERATIONS].adapter(request.match_info["name"])


async def explain_adapter(request: web.Request) -> ExplanationView:
    return await request.app[OPERATIONS].explain(request.match_info["name"])


def change(operation: Callable[[Operations, str], Awaitable[None]]) -> AdapterHandler:
    """The handler that runs `operation` on the adapter of the path and shows it afterwards."""

    async def handle(request: web.Request) -> AdapterView:
        await operation(request.app[OPERATIONS], request.match_info["name"])
        return await show_adapter(request)

    return handle


async def unload_adapter(request: web.Request) -> AdapterView:
    """Answers at once: what still runs is in the view's `requests`."""
    query = parse_query(request, UnloadQuery)
    await request.app[OPERATIONS].unload(request.match_info["name"], query.seconds)
    return await show_adapter(request)


async def load_adapter(request: web.Request) -> web.Response:
    """200: it was loaded, 201: it is now, 202: it is being loaded; the latter two with a Location."""
    query = parse_query(request, LoadQuery)
    body = await parse_body(request, LoadBody)
    name = request.match_info["name"]
    outcome = await request.app[OPERATIONS].load(name, body.source, query.wait)
    status = {LoadOutcome.READY: 200, LoadOutcome.DONE: 201, LoadOutcome.UNDER_WAY: 202}[outcome]
    headers = {} if outcome is LoadOutcome.READY else {"Location": request.rel_url.raw_path}
    return respond_json(await show_adapter(request), status, headers)


async def show_config(request: web.Request) -> ConfigView:
    return ConfigView(settings=tuple(await request.app[OPERATIONS].config()))


async def show_routing(request: web.Request) -> RoutingView:
    return await request.app[OPERATIONS].routing()


async def show_pool(request: web.Request) -> PoolView:
    return await request.app[OPERATIONS].pool()


async def metrics(request: web.Request) -> web.Response:
    """The exposition; without an answer from the engines it holds what this process counts itself."""
    exporter = request.app[METRICS]
    await exporter.refresh(request.app[OPERATIONS].measure)
    body, content_type = render(exporter.registry, request.headers.get(hdrs.ACCEPT, ""))
    return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})


def respond_json(
    content: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A model as a response."""
    text = content.model_dump_json()
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")
