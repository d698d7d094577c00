"""The admin endpoint on a thread and event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future

from aiohttp import web

from lora_plugin.admin.connections import BoundedRunner

Address = tuple[str, int]

_log = logging.getLogger("lora_plugin.admin")
# aiohttp waits this long twice: for the handlers to end, then for their cancellation.
_DRAIN_SECONDS = 0.5
_STOP_SECONDS = 2.0


class AdminServer:
    """Serves the application that `app_factory` makes; the factory is called on the server's own thread.

    The thread is a daemon and waits for nothing of the caller's: `start` and `stop` may be called from a
    running event loop, and a busy one never delays an answer that needs nothing from it.
    """

    def __init__(
        self,
        app_factory: Callable[[], web.Application],
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._app_factory = app_factory
        self._host = host
        self._port = port
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    def start(self) -> Address | None:
        """The address bound (port 0: any free one), or None after one warning when it cannot be had."""
        bound: Future[Address] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(bound)), name="lora-plugin-admin", daemon=True
        )
        self._thread.start()
        try:
            return bound.result()
        except OSError as error:
            _log.warning(
                "admin: cannot listen on %s:%d (%s); serving goes on without the admin endpoint; "
                "set LORA_PLUGIN_ADMIN_PORT to a free port",
                self._host,
                self._port,
                error.strerror or error,
            )
            return None

    def stop(self) -> None:
        """Ends the thread within two seconds; a second call, or one without `start`, does nothing."""
        if self._thread is None:
            return
        if self._loop is not None and self._stopping is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_SECONDS)
        self._thread = None

    async def _serve(self, bound: Future[Address]) -> None:
        runner = None
        try:
            runner = BoundedRunner(self._app_factory(), access_log=None, shutdown_timeout=_DRAIN_SECONDS)
            await runner.setup()
            await web.TCPSite(runner, self._host, self._port, ssl_context=self._tls).start()
        except Exception as error:
            if runner is not None:
                await runner.cleanup()
            bound.set_exception(error)
            return
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        host, port = runner.addresses[0][:2]
        bound.set_result((host, port))
        await self._stopping.wait()
        await runner.cleanup()
