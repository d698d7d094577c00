"""Makes versions ready before their requests reach the engine: one load, however many wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

from lora_plugin.aside import lower_priority
from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.entry import AdapterState, Version
from lora_plugin.directory.events import Event, EventKind
from lora_plugin.errors import AdapterIncomplete, AdapterRejected, Code, Reason, Unavailable
from lora_plugin.readiness.flights import Flights
from lora_plugin.readiness.prefetch import Prefetcher
from lora_plugin.readiness.staging import CONFIRM_SECONDS, HOLD_SECONDS, EngineLink, StageSpec, Staging
from lora_plugin.readiness.verdicts import look_again, too_slow, verdict
from lora_plugin.settings import Settings

logger = logging.getLogger("lora_plugin")

_T = TypeVar("_T")


class _Ready(NamedTuple):
    """A version that every engine has; `since`: when they said so, monotonic seconds."""

    version: Version
    since: float


class Readiness:
    """Which versions are ready in every engine, and the way there; belongs to one event loop.

    Args:
        catalog: names, versions, changes.
        link: the line to the engines.
        settings: `load_timeout_seconds`, `settle_seconds`, `prefetch`.
        ended: returns once no response of this process uses the version; before, it is not let go.
    """

    def __init__(
        self,
        catalog: Catalog,
        link: EngineLink,
        settings: Settings,
        ended: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._catalog = catalog
        self._link = link
        self._ended = ended
        self._timeout = settings.load_timeout_seconds
        self._settle_seconds = settings.settle_seconds
        self._prefetching = settings.prefetch
        self._staging = Staging(link)
        self._threads = ThreadPoolExecutor(
            max_workers=2, thread_name_prefix="lora-plugin-digest", initializer=lower_priority
        )
        self._flights: Flights[Version] = Flights()
        self._prefetcher = Prefetcher(self._warm)
        self._ready: dict[str, _Ready] = {}
        self._asked: dict[str, Version] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Follows the catalog from now on; called on the event loop."""
        loop = asyncio.get_running_loop()

        def follow(event: Event) -> None:
            # The loop may have ended before the catalog's thread.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._follow, event)

        self._unsubscribe = self._catalog.events.subscribe(follow)

    def stop(self) -> None:
        """Ends all waiting; called on the event loop. A second call does nothing."""
        self._unsubscribe()
        self._prefetcher.stop()
        self._flights.cancel()
        for task in self._releases:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ready(self, name: str) -> Version | None:
        """The version that is served and known to be ready; costs look-ups only."""
        ready = self._ready.get(name)
        return ready.version if ready is not None and ready.version == self._served(name) else None

    def confirmed(self, name: str) -> Version | None:
        """As `ready`, if the engines said so a moment ago: their host caches may lose it later."""
        version = self.ready(name)
        fresh = version is not None and time.monotonic() - self._ready[name].since <= CONFIRM_SECONDS
        return version if fresh else None

    async def version(self, name: str) -> Version:
        """The version that is served, ready or not. Raises as `Catalog.version_of`.

        A digest that nobody needed yet is computed on threads of its own: it may take all of a large file,
        and the event loop's are for what takes a moment.
        """
        if (served := self._served(name)) is not None:
            return served
        return await self._in_thread(self._catalog.version_of, name)

    async def ensure(self, name: str, *, soon: bool = False) -> Version:
        """The version that is served, once it is ready in every engine.

        Args:
            name: of the adapter.
            soon: a request follows (`StageSpec.soon`).

        Raises:
            AdapterNotFound: no adapter of that name is served, or no longer.
            AdapterRejected: with its reason.
            Unavailable: NOT_READY after the load timeout; or why the engines cannot take it now.
        """
        if (version := self.ready(name)) is not None:
            return version
        self._catalog.find(name)
        try:
            return await self._flights.join(name, lambda: self._prepare(name, soon), self._timeout)
        except TimeoutError:
            raise self._not_ready(name) from None

    async def confirm(self, name: str, *, soon: bool = False) -> Version:
        """As `ensure`, but the engines are asked in any case: their host caches may have lost it since."""
        if (version := self.ready(name)) is not None:
            self.forget(version)
        return await self.ensure(name, soon=soon)

    def prefetch(self, name: str) -> None:
        """Makes it ready in the background, one adapter at a time; failures show in the catalog only."""
        self._prefetcher.add(name)

    def forget(self, version: Version) -> None:
        """It may be ready no longer: the next `ensure` asks the engines again."""
        ready = self._ready.get(version.name)
        if ready is not None and ready.version == version:
            del self._ready[version.name]

    def spec(self, version: Version) -> StageSpec:
        """The version as it is sent to the engines."""
        path = str(self._catalog.path_of(version.name))
        return StageSpec(version.id, version.name, version.digest, path, version.packed_bytes)

    async def _warm(self, name: str) -> None:
        """As `ensure`, if no other adapter has to leave for it."""
        version = await self.version(name)
        if version.packed_bytes <= await self._link.room():
            await self.ensure(name)

    async def _prepare(self, name: str, soon: bool) -> Version:
        try:
            return await self._stage(name, soon)
        except AdapterIncomplete:
            await look_again(self._catalog, (name,), self._settle_seconds)
        try:
            return await self._stage(name, soon)
        except AdapterIncomplete as error:
            raise Unavailable.of(error.reason) from error

    async def _stage(self, name: str, soon: bool) -> Version:
        while True:
            version = await self.version(name)
            self._ask_for(version)
            status = await self._staging.stage(replace(self.spec(version), soon=soon))
            if version != self._served(name):
                continue
            if status.state == "ready":
                self._ready[name] = _Ready(version, time.monotonic())
                return version
            self._fail(version, status.reason)

    def _fail(self, version: Version, reason: Reason | None) -> None:
        error = verdict(reason or Reason(Code.CHANGED, f"the load of {version.name!r} was given up"))
        if isinstance(error, AdapterRejected):
            self._catalog.reject(version.name, version.digest, error.reason)
        raise error

    def _not_ready(self, name: str) -> Unavailable:
        version = self._asked.get(name)
        waits_for = self._staging.waits_for(version.id) if version else None
        return too_slow(f"the adapter {name!r}", self._timeout, waits_for)

    def _served(self, name: str) -> Version | None:
        adapter = self._catalog.get(name)
        return adapter.version if adapter is not None and adapter.state is AdapterState.LISTED else None

    def _ask_for(self, version: Version) -> None:
        self._let_go(version.name, keep=version)
        self._asked[version.name] = version

    def _follow(self, event: Event) -> None:
        """On the loop, after every transition: what is served no longer is let go."""
        served = self._served(event.name)
        self._let_go(event.name, keep=served)
        adapter = self._catalog.get(event.name)
        new = event.kind is EventKind.UPDATED or (
            event.kind is EventKind.LISTED and adapter is not None and not adapter.at_start
        )
        if new and self._prefetching:
            self._prefetcher.add(event.name)

    def _let_go(self, name: str, *, keep: Version | None) -> None:
        asked = self._asked.get(name)
        if asked is None or asked == keep:
            return
        del self._asked[name]
        self._ready.pop(name, None)
        self._staging.abandon(asked.id)
        task = asyncio.create_task(self._release(asked))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, version: Version) -> None:
        if self._ended is not None:
            await self._ended(version.id)
        try:
            # The engines hold it for a moment; the second word lets an idle one notice that it is over.
            for pause in (0, HOLD_SECONDS + 0.1):
                await asyncio.sleep(pause)
                if self._asked.get(version.name) != version:
                    await self._link.release(version.id)
        except Exception as error:
            logger.warning("The engines were not told that %r changed: %s", version.name, error)

    async def _in_thread(self, function: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
