"""What a row of the route table is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from pydantic import BaseModel

from lora_plugin.admin.handlers import respond_json

Respond = Callable[[web.Request], Awaitable[BaseModel | web.StreamResponse]]


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
        body: the model of the JSON body, if there is one.
        statuses: those of success.
        content_type: the response's, in success.
        public: answered without a token.
    """

    method: str
    path: str
    operation: str
    respond: Respond
    model: type[BaseModel] | None
    summary: str
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    statuses: tuple[int, ...] = (200,)
    content_type: str = "application/json"
    public: bool = False

    @property
    def problems(self) -> tuple[int, ...]:
        """The statuses of refusals, ascending."""
        found = {403, 408, 413, 500, 503}
        found |= set() if self.public else {401, 429}
        found |= {400} if self.query or self.body or "{" in self.path else set()
        found |= {422} if self.body else set()
        if "{" in self.path:
            found |= {404} if self.method == hdrs.METH_GET else {404, 409}
        return tuple(sorted(found))

    def handler(self) -> Handler:
        """`respond` in aiohttp's form."""

        async def handle(request: web.Request) -> web.StreamResponse:
            answer = await self.respond(request)
            return answer if isinstance(answer, web.StreamResponse) else respond_json(answer)

        return handle
