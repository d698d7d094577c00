"""The event log as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from aiohttp import hdrs, web

from lora_plugin.admin.inputs import parse_query
from lora_plugin.admin.middlewares import REQUEST_ID, current_request_id
from lora_plugin.admin.models import EventView, ReasonView
from lora_plugin.admin.queries import EventsQuery
from lora_plugin.directory.events import Event, EventLog

MAX_LISTENERS = 16
HEARTBEAT_SECONDS = 15.0
_WRITE_SECONDS = 10.0
_LAST_EVENT_ID = "Last-Event-ID"


class EventStream:
    """Every listener reads from the one bounded log at its own pace, so that a slow one costs nothing.

    Ids begin with a word of this process: one of another is recognised, and all that is held is sent.

    Args:
        log: the catalog's.
        max_listeners: more are refused (429).
        heartbeat: seconds between signs of life where nothing happens.
    """

    def __init__(
        self, log: EventLog, max_listeners: int = MAX_LISTENERS, heartbeat: float = HEARTBEAT_SECONDS
    ) -> None:
        self._log = log
        self._max_listeners = max_listeners
        self._heartbeat = heartbeat
        self._process = secrets.token_hex(4)
        self._listeners = 0

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Streams until the client is gone or the server ends."""
        query = parse_query(request, EventsQuery)
        given = query.after or request.headers.get(_LAST_EVENT_ID)
        with self._place():
            response = web.StreamResponse(
                headers={
                    hdrs.CONTENT_TYPE: "text/event-stream",
                    hdrs.CACHE_CONTROL: "no-store",
                    REQUEST_ID: current_request_id.get(),
                }
            )
            await response.prepare(request)
            if request.method == hdrs.METH_HEAD:
                return response
            # A client that is gone, or takes nothing, ends its stream.
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with contextlib.aclosing(self._texts(given)) as texts:
                    async for text in texts:
                        await asyncio.wait_for(response.write(text.encode()), _WRITE_SECONDS)
        return response

    async def _texts(self, given: str | None) -> AsyncGenerator[str, None]:
        seq, missed = self._start(given)
        with self._wake_up() as news:
            yield self._reset(seq) if missed else ": here\n\n"
            while True:
                news.clear()
                for event in self._log.since(seq):
                    if event.seq > seq + 1:
                        yield self._reset(event.seq - 1)
                    seq = event.seq
                    yield self._text(event)
                try:
                    await asyncio.wait_for(news.wait(), self._heartbeat)
                except TimeoutError:
                    yield ": alive\n\n"

    def _start(self, given: str | None) -> tuple[int, bool]:
        """After which event to begin, and whether the client's own place is unknown."""
        if given is None:
            return self._log.last, False
        oldest = self._log.oldest - 1
        if given == "0":
            return oldest, False
        process, _, number = given.partition("-")
        known = process == self._process and number.isascii() and number.isdecimal() and len(number) < 16
        if not known or not oldest <= int(number) <= self._log.last:
            return oldest, True
        return int(number), False

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._listeners >= self._max_listeners:
            raise web.HTTPTooManyRequests(
                reason=f"There are {self._listeners} listeners already", headers={hdrs.RETRY_AFTER: "5"}
            )
        self._listeners += 1
        try:
            yield
        finally:
            self._listeners -= 1

    @contextmanager
    def _wake_up(self) -> Iterator[asyncio.Event]:
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Event) -> None:
            # The loop may have ended before the catalog's thread.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(news.set)

        unsubscribe = self._log.subscribe(tell)
        try:
            yield news
        finally:
            unsubscribe()

    def _id(self, seq: int) -> str:
        return f"{self._process}-{seq}"

    def _reset(self, seq: int) -> str:
        return f"id: {self._id(seq)}\nevent: reset\ndata: {{}}\n\n"

    def _text(self, event: Event) -> str:
        view = EventView(
            id=self._id(event.seq),
            time=event.time,
            kind=event.kind,
            name=event.name,
            version=event.version,
            reason=None if event.reason is None else ReasonView.of(event.reason),
        )
        return f"id: {view.id}\nevent: {view.kind}\ndata: {view.model_dump_json(exclude_none=True)}\n\n"
