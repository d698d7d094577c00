"""Adapters that are fetched because a request names them and the watched directory has none of the name."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from lora_plugin.adapter.names import RESERVED, is_adapter_name
from lora_plugin.directory.catalog import Catalog
from lora_plugin.errors import AdapterNotFound, Code, LoraPluginError, Unavailable
from lora_plugin.hooks.manager import HookFailed, HookManager
from lora_plugin.settings import Settings
from lora_plugin.sources.incoming import Incoming

logger = logging.getLogger("lora_plugin")

_AT_ONCE = 8
_REMEMBER_SECONDS = 5.0
_REMEMBER_NAMES = 1000
_LOOKS = 3


class RequestedAdapters:
    """Asks the plugins for names that the catalog does not know; belongs to one event loop.

    Args:
        catalog: what is served; looks at a folder once it was fetched.
        hooks: who is asked.
        settings: `adapter_dir`, `max_adapter_bytes`, `load_timeout_seconds`, `settle_seconds`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        catalog: Catalog,
        hooks: HookManager,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._hooks = hooks
        self._incoming = Incoming(settings.adapter_dir, settings.max_adapter_bytes)
        self._timeout = settings.load_timeout_seconds
        self._settle_seconds = settings.settle_seconds
        self._clock = clock
        self._flights: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, tuple[float, LoraPluginError]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def ensure(self, name: str) -> None:
        """Returns once there is a folder of the name that the catalog has looked at.

        One flight per name, however many wait; it goes on when they give up. A failure is remembered for a
        few seconds, so that a name that leads nowhere cannot keep plugins and threads busy.

        Raises:
            AdapterNotFound: NOT_FOUND: no plugin knows the name.
            AdapterRejected: TOO_LARGE.
            Unavailable: FETCH_FAILED; NOT_READY: it was not fetched within the load timeout.
        """
        # The flight first: near its end the catalog has seen the folder, and not looked into it yet.
        if (flight := self._flights.get(name)) is None:
            if self._catalog.get(name) is not None or not self._hooks.has("resolve_source"):
                return
            flight = self._start(name)
        try:
            await asyncio.wait_for(asyncio.shield(flight), self._timeout)
        except TimeoutError:
            raise Unavailable(
                Code.NOT_READY,
                f"the adapter {name!r} was not fetched within {self._timeout:g} seconds",
                hint="try again, or raise LORA_PLUGIN_LOAD_TIMEOUT_SECONDS",
            ) from None

    def _start(self, name: str) -> asyncio.Task[None]:
        if not is_adapter_name(name) or name in RESERVED:
            raise AdapterNotFound.named(name)
        self._raise_remembered(name)
        flight = self._flights[name] = asyncio.create_task(self._fly(name))
        flight.add_done_callback(lambda task: self._land(name, task))
        return flight

    def clean(self) -> None:
        """Removes what servers that ended left half fetched. Blocks."""
        self._incoming.clean()

    async def _fly(self, name: str) -> None:
        async with self._slots:
            await asyncio.wrap_future(_in_daemon_thread(lambda: self._fetch(name)))

    def _land(self, name: str, task: asyncio.Task[None]) -> None:
        del self._flights[name]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, LoraPluginError):
            while len(self._failures) >= _REMEMBER_NAMES:
                del self._failures[next(iter(self._failures))]
            self._failures[name] = (self._clock() + _REMEMBER_SECONDS, error)

    def _raise_remembered(self, name: str) -> None:
        until, error = self._failures.get(name, (0.0, None))
        if error is None:
            return
        if self._clock() < until:
            raise type(error).of(error.reason)
        del self._failures[name]

    def _fetch(self, name: str) -> None:
        started = time.monotonic()
        try:
            source = self._hooks.resolve_source(name)
        except HookFailed as error:
            raise _failed(name, "it could not be looked up") from error
        if source is None:
            raise AdapterNotFound.named(name)
        try:
            description = source.description
            nbytes = self._incoming.receive(name, source.fetch)
        except LoraPluginError as error:
            logger.warning("adapter %r could not be fetched: %s", name, error)
            raise
        except BaseException as error:
            # On a thread of its own a plugin may raise anything, the end of an event loop that it ran too.
            logger.warning("adapter %r could not be fetched", name, exc_info=True)
            raise _failed(name, "its source failed") from error
        seconds = time.monotonic() - started
        logger.info("adapter %r fetched from %s: %d bytes in %.1f s", name, description, nbytes, seconds)
        self._look(name)

    def _look(self, name: str) -> None:
        """Has the catalog conclude about the folder: it wants to see it unchanged for the settle time."""
        for _ in range(_LOOKS):
            self._catalog.scan((name,))
            if name not in self._catalog.pending():
                return
            time.sleep(self._settle_seconds)


def _in_daemon_thread(work: Callable[[], None]) -> Future[None]:
    """Runs it on a thread that the end of the process does not wait for: a source may hang."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="lora-plugin-fetch", daemon=True).start()
    return future


def _failed(name: str, why: str) -> Unavailable:
    message = f"the adapter {name!r} could not be fetched"
    return Unavailable(Code.FETCH_FAILED, message, found=why, hint="see the server's log")
