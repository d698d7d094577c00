"""One function per route: from the request to the operation to the response model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lora_plugin.admin.models import AdapterPage, AdapterView, HealthView, PoolView
from lora_plugin.admin.operations import Operations
from lora_plugin.entry import AdapterState
from lora_plugin.errors import BadRequest, Code, LoraPluginError, Unavailable
from lora_plugin.metrics import Metrics, Snapshot

OPERATIONS: web.AppKey[Operations] = web.AppKey("operations")
METRICS: web.AppKey[Metrics] = web.AppKey("metrics", Metrics)

AdapterHandler = Callable[[web.Request], Awaitable[AdapterView]]


class ListQuery(BaseModel):
    """The query of `GET /v1/adapters`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: AdapterState | None = Field(default=None, description="only adapters in this state")
    q: str | None = Field(default=None, description="only names that contain this, whatever the case")
    limit: int = Field(default=100, ge=1, le=1000)
    offset: int = Field(default=0, ge=0)

    def matches(self, adapter: AdapterView) -> bool:
        state = self.state is None or adapter.state == self.state
        return state and (self.q is None or self.q.lower() in adapter.name.lower())


async def health(request: web.Request) -> HealthView:
    """Raises Unavailable until the first scan is done."""
    if not await request.app[OPERATIONS].ready():
        raise Unavailable(Code.NOT_READY, "The first scan of the adapter directory is not finished")
    return HealthView()


async def list_adapters(request: web.Request) -> AdapterPage:
    """Raises BadRequest for unknown or malformed filters."""
    query = _list_query(request)
    found = [view for view in await request.app[OPERATIONS].adapters() if query.matches(view)]
    page = found[query.offset : query.offset + query.limit]
    return AdapterPage(adapters=tuple(page), total=len(found), offset=query.offset, limit=query.limit)


async def show_adapter(request: web.Request) -> AdapterView:
    return await request.app[OPERATIONS].adapter(request.match_info["name"])


def change(operation: Callable[[Operations, str], Awaitable[None]]) -> AdapterHandler:
    """The handler that runs `operation` on the adapter of the path and shows it afterwards."""

    async def handle(request: web.Request) -> AdapterView:
        await operation(request.app[OPERATIONS], request.match_info["name"])
        return await show_adapter(request)

    return handle


async def show_pool(request: web.Request) -> PoolView:
    return await request.app[OPERATIONS].pool()


async def metrics(request: web.Request) -> web.Response:
    """The exposition; without an answer from the engines it holds what this process counts itself."""
    exporter, operations = request.app[METRICS], request.app[OPERATIONS]
    try:
        snapshot = Snapshot(await operations.adapters(), await operations.pool())
    except LoraPluginError:
        snapshot = None
    exporter.update(snapshot)
    body, content_type = exporter.render(request.headers.get(hdrs.ACCEPT, ""))
    return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})


def _list_query(request: web.Request) -> ListQuery:
    try:
        return ListQuery.model_validate(dict(request.query))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise BadRequest(
            Code.BAD_REQUEST,
            f"The query parameter {field!r} is not accepted: {first['msg']}",
            found=str(first["input"]),
            hint=f"the parameters are {', '.join(ListQuery.model_fields)}",
        ) from None
