"""The API server's part put together: catalog, watcher, readiness, admin endpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine
from contextlib import AbstractContextManager
from typing import Any

from lora_plugin.admin.opening import open_admin
from lora_plugin.admin.server import AdminServer
from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.entry import AdapterState
from lora_plugin.directory.events import Event, EventKind
from lora_plugin.directory.watcher import Watcher
from lora_plugin.errors import AdapterNotFound
from lora_plugin.explainer import Explainer
from lora_plugin.extensions.access import check_access
from lora_plugin.extensions.lifecycle import CatalogEvents
from lora_plugin.extensions.metrics import export_plugins
from lora_plugin.hooks import Request
from lora_plugin.hooks.builtin.spelling import BASE
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hub.folders import HubFolders
from lora_plugin.layout import ModelLayout
from lora_plugin.metrics import Metrics, render
from lora_plugin.operations import AdapterOperations
from lora_plugin.readiness.engines import Engines
from lora_plugin.readiness.leases import Leases
from lora_plugin.readiness.readiness import Readiness
from lora_plugin.routing.chooser import Chooser
from lora_plugin.routing.composer import Composer
from lora_plugin.routing.files import RoutingFiles
from lora_plugin.routing.ready_versions import ReadyVersions
from lora_plugin.routing.router import Router
from lora_plugin.settings import Settings
from lora_plugin.sources.arrivals import Arrivals, nowhere
from lora_plugin.sources.requested import RequestedAdapters

logger = logging.getLogger("lora_plugin")

_FIRST_SCAN_SECONDS = 30.0
_MAY_PIN = frozenset({EventKind.LISTED, EventKind.UPDATED, EventKind.PINNED})


class Service:
    """Serves names: what requests are resolved by, and what the admin endpoint shows and steers.

    Args:
        settings: the operator's.
        engines: the line to the engines.
        layout: the model's.
        hooks: this process's.
        base_models: names that the base model is served under.
        with_admin: whether this process has the admin endpoint (one of several API servers does).

    Attributes:
        chooser: gives every request its version.
        operations: what the operator can do.
    """

    def __init__(
        self,
        settings: Settings,
        engines: Engines,
        layout: ModelLayout,
        hooks: HookManager,
        *,
        base_models: Collection[str],
        with_admin: bool,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._hooks = hooks
        folders = HubFolders.from_settings(settings, layout, {*base_models, BASE})
        self._catalog = Catalog(settings.adapter_dir, folders, settle_seconds=settings.settle_seconds)
        self._files = RoutingFiles(
            settings.adapter_dir,
            base_models,
            settle_seconds=settings.settle_seconds,
            reachable=self._catalog.reachable,
        )
        self._watcher = Watcher(self._catalog, settings, look=self._look_at_files)
        leases = self._leases = Leases(engines)
        self._readiness = Readiness(self._catalog, engines, settings, leases.ended)
        self._composer = Composer(
            self._catalog,
            self._readiness.version,
            engines,
            leases.ended,
            settle_seconds=settings.settle_seconds,
            max_rank=layout.max_rank,
            timeout=settings.load_timeout_seconds,
        )
        self._requested = RequestedAdapters(self._catalog, hooks, settings)
        self._arrivals = Arrivals(self._catalog, settings, base_models)
        self._metrics = Metrics()
        self.chooser = Chooser(
            Router(hooks, self._files, base_models),
            hooks,
            self._catalog,
            engines,
            leases,
            ReadyVersions(
                self._arrivals,
                self._requested,
                self._readiness,
                self._composer,
                leases,
                self._metrics.staging_seconds.observe,
            ),
            log_level=logging.INFO if settings.log_requests else logging.DEBUG,
        )
        self._first = with_admin
        self._with_admin = with_admin and settings.admin_port != 0
        if self._with_admin:
            export_plugins(hooks, self._metrics.registry)
        self._admin: AdminServer | None = None
        self.operations = AdapterOperations(
            self._catalog,
            engines,
            self._readiness,
            self._arrivals,
            self._files,
            Explainer(self._catalog, engines, self._files, self._composer, layout),
            settings.load_timeout_seconds,
        )
        self._loop: asyncio.AbstractEventLoop

    async def start(self) -> None:
        """Watch, list what is there, and open the admin endpoint; returns when the names are known."""
        self._loop = asyncio.get_running_loop()
        self._readiness.start()
        self._catalog.events.subscribe(self._follow)
        self._catalog.events.subscribe(CatalogEvents(self._hooks, self._catalog.get))
        if self._with_admin:
            self._admin = open_admin(
                self._settings,
                self.operations,
                self._loop,
                metrics=self._metrics,
                events=self._catalog.events,
                plugin_routes=self._hooks.admin_routes(),
            )
        await asyncio.to_thread(self._look_at_files, at_once=True)
        self._watcher.start()
        await asyncio.to_thread(self._requested.clean)
        await asyncio.to_thread(self._watcher.first_scan, _FIRST_SCAN_SECONDS)
        self.operations.scanned = True
        states = [adapter.state for adapter in self._catalog.list()]
        logger.info(
            "serving %d adapters from %s (%d refused)",
            states.count(AdapterState.LISTED),
            self._settings.adapter_dir,
            states.count(AdapterState.REJECTED),
        )

    def stop(self) -> None:
        """End the threads; a second call does nothing."""
        self._watcher.stop()
        self.operations.stop()
        self._readiness.stop()
        self._composer.stop()
        self._leases.stop()
        if self._admin is not None:
            self._admin.stop()
            self._admin = None

    # What requests need

    async def exposition(self) -> bytes:
        """The metrics as text, without those that the host sums up over several API servers."""
        await self._metrics.refresh(self.operations.measure)
        shown = await asyncio.to_thread(render, self._metrics.registry, with_summed=False)
        return shown[0]

    def counting_refusals(self) -> AbstractContextManager[None]:
        """Around the choice of a request's adapter: what refuses it is counted by its code."""
        return self._metrics.counting_refusals()

    def serves(self, name: str) -> bool:
        """Whether an adapter is served under the name, or it is an alias or a composition."""
        adapter = self._catalog.get(name)
        return (adapter is not None and adapter.state is AdapterState.LISTED) or name in self._files.names

    def names(self) -> list[str]:
        """The names served, aliases and compositions among them, sorted."""
        return sorted({adapter.name for adapter in self._catalog.listed()} | self._files.names)

    async def check_new_name(self, name: str, place: str, request: Request) -> None:
        """Raises as `check_access` where `name` would stand for an adapter that the request may not have."""
        adapter = await self._arrivals.adapter_of(place)
        if adapter is None or adapter == name:
            return
        try:
            check_access(self._hooks, request, adapter)
        except AdapterNotFound:
            raise nowhere(place) from None

    def _look_at_files(self, *, at_once: bool = False) -> float | None:
        wait = self._files.look(at_once=at_once)
        for file in self._files.all:
            self._metrics.note_routing_file(file.name, valid=file.reason is None)
        return wait

    def _follow(self, event: Event) -> None:
        """Called on the catalog's threads, after every transition."""
        if self._first and event.kind is EventKind.REJECTED and event.reason is not None:
            self._metrics.count_rejection(event.reason.code)
        adapter = self._catalog.get(event.name)
        if event.kind in _MAY_PIN and adapter is not None and adapter.pinned:
            # A pin is by name: it outlives a restart, a new version takes it over, another process may write
            # it to the state file.
            self._in_the_loop(self._pin_again(event.name), event.name)
        if event.kind is EventKind.UNPINNED and adapter is not None and adapter.version is not None:
            self._in_the_loop(self._engines.unpin(adapter.version.id), event.name)

    def _in_the_loop(self, work: Coroutine[Any, Any, None], name: str) -> None:
        async def told() -> None:
            try:
                await work
            except Exception as error:
                logger.warning("the engines were not told of the pin of adapter %r: %s", name, error)

        asyncio.run_coroutine_threadsafe(told(), self._loop)

    async def _pin_again(self, name: str) -> None:
        version = await self._readiness.confirm(name)
        adapter = self._catalog.get(name)
        # It may have been unpinned while it was loaded.
        if adapter is not None and adapter.pinned:
            await self._engines.pin(version.id)
