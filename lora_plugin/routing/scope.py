"""One client request, from its first byte until its response has ended; a middleware for the host's app."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lora_plugin.hooks.builtin.spelling import BASE
from lora_plugin.readiness.staging import StageSpec

logger = logging.getLogger("lora_plugin")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HEADER = "X-LoRA-Adapter"
_VERSION_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a request was given; fixed when it was routed.

    Attributes:
        spec: the version; None for the base model.
        asked: what the client said.
    """

    spec: StageSpec | None
    asked: str = BASE

    @property
    def label(self) -> str:
        """`name@version`, or `base`."""
        return BASE if self.spec is None else f"{self.spec.name}@{self.spec.digest[:_VERSION_DIGITS]}"


class RequestScope:
    """What is known of the client request that the present code works for.

    One object per request, the same in all tasks that were started for it; belongs to the event loop.

    Args:
        path: of the endpoint; empty where there is no HTTP request (a batch file).
        raw_headers: as ASGI has them.
    """

    def __init__(self, path: str = "", raw_headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.path = path
        self.chosen: Chosen | None = None
        self._raw_headers = raw_headers
        self._callbacks: list[Callable[[], None]] = []
        self._ended = False

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """By lower-case name, what is repeated joined by ", "; secrets are among them."""
        headers: dict[str, str] = {}
        for raw_name, raw_value in self._raw_headers:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return headers

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls it when the response has ended or the client is gone; at once if that is so already.

        It must not block; what it raises is logged. Outside an HTTP request it is never called.
        """
        if self._ended:
            _call(callback)
        else:
            self._callbacks.append(callback)

    def end(self) -> None:
        """The response has ended, or will never be sent."""
        self._ended = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback)


_current: ContextVar[RequestScope | None] = ContextVar("lora_plugin_request", default=None)


def current_request() -> RequestScope:
    """The scope of the request at hand; where there is none, one that nobody keeps."""
    return _current.get() or RequestScope()


def begin_choice() -> RequestScope:
    """The scope that a choice is to be kept in: the HTTP request's, else a new one of this task."""
    request = _current.get()
    if request is None or not request.path:
        # Never one that an outer task began: its other tasks are other requests.
        request = RequestScope()
        _current.set(request)
    return request


class RequestScopes:
    """ASGI middleware: gives every request its scope, and its response the header that names the adapter.

    Args:
        app: what is wrapped.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request = RequestScope(scope["path"], scope["headers"])
        token = _current.set(request)
        try:
            await self._app(scope, receive, _named(request, send))
        finally:
            _current.reset(token)
            request.end()


def _named(request: RequestScope, send: Send) -> Send:
    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start" and request.chosen is not None:
            header = (HEADER.lower().encode(), request.chosen.label.encode("latin-1"))
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return send_named


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        logger.exception("the end of a request could not be told")
