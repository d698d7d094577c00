"""The API server's part put together: catalog, watcher, readiness, admin endpoint."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pydantic import SecretStr, ValidationError

from lora_plugin.admin.app import create_app
from lora_plugin.admin.bridge import LoopBridge
from lora_plugin.admin.callers import Tokens
from lora_plugin.admin.explanation import ExplanationView
from lora_plugin.admin.models import AdapterView, HubSource, PoolView, RoutingView, SettingView
from lora_plugin.admin.operations import Load
from lora_plugin.admin.server import AdminServer
from lora_plugin.admin.tls import server_context
from lora_plugin.catalog import Catalog
from lora_plugin.entry import Adapter, AdapterState, Version
from lora_plugin.errors import (
    AdapterBusy,
    AdapterNotFound,
    AdapterRejected,
    BadRequest,
    Code,
    Forbidden,
    LoraPluginError,
    Unavailable,
)
from lora_plugin.events import Event, EventKind
from lora_plugin.explanation import Facts, alias_finding, engine_facts, findings, layers_view
from lora_plugin.extensions.lifecycle import CatalogEvents
from lora_plugin.extensions.metrics import export_plugins
from lora_plugin.hooks import Part
from lora_plugin.hooks.builtin.spelling import BASE
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hub.reference import HubReference
from lora_plugin.layout import ModelLayout
from lora_plugin.leases import Leases
from lora_plugin.loads import Loads
from lora_plugin.metrics import Metrics, Snapshot, render
from lora_plugin.readiness import EngineLink, Readiness, StageSpec
from lora_plugin.routing.chooser import Chooser
from lora_plugin.routing.composer import Composer
from lora_plugin.routing.files import RoutingFiles
from lora_plugin.routing.router import Router
from lora_plugin.routing.scope import RequestScope
from lora_plugin.setting_rows import setting_rows
from lora_plugin.settings import Settings, is_loopback
from lora_plugin.sources.arrivals import Arrivals
from lora_plugin.sources.requested import RequestedAdapters
from lora_plugin.views import Residents, alias_targets, part_targets, pool_view, routing_view
from lora_plugin.watcher import Watcher

logger = logging.getLogger("lora_plugin")

_FIRST_SCAN_SECONDS = 30.0
_CONFIRM_SECONDS = 1.0
"""For so long after the engines said that a version is ready they are not asked again."""
_MAY_PIN = frozenset({EventKind.LISTED, EventKind.UPDATED, EventKind.PINNED})


class Engines(EngineLink, Protocol):
    """What the operator's side needs of the engines beyond staging."""

    async def lease(self, client: str, adapter_ids: list[int], seconds: float) -> set[int]: ...

    async def drain(self, name: str, seconds: float) -> None: ...

    async def evict(self, adapter_id: int) -> None: ...

    async def pin(self, adapter_id: int) -> None: ...

    async def unpin(self, adapter_id: int) -> None: ...

    async def snapshots(self) -> list[dict[str, Any]]: ...

    async def measure(self) -> list[dict[str, Any]]: ...
    async def explain(self, adapter_id: int) -> list[dict[str, Any]]: ...


class Service:
    """Serves names: what requests are resolved by, and what the admin endpoint shows and steers.

    Args:
        settings: the operator's.
        engines: the line to the engines.
        layout: the model's.
        hooks: this process's.
        base_models: names that the base model is served under.
        with_admin: whether this process has the admin endpoint (one of several API servers does).
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
        self._layout = layout
        self._catalog = Catalog.from_settings(settings, layout, {*base_models, BASE})
        self._files = RoutingFiles(settings.adapter_dir, base_models, settle_seconds=settings.settle_seconds)
        self._watcher = Watcher(self._catalog, settings, look=self._look_at_files)
        self._leases = Leases(engines)
        self._readiness = Readiness(self._catalog, engines, settings, self._leases.ended)
        self._composer = Composer(
            self._catalog,
            engines,
            self._leases.ended,
            settle_seconds=settings.settle_seconds,
            max_rank=layout.max_rank,
            timeout=settings.load_timeout_seconds,
        )
        self._requested = RequestedAdapters(self._catalog, hooks, settings)
        self.chooser = Chooser(
            Router(hooks, self._files, base_models),
            hooks,
            self._catalog,
            engines,
            self._leases,
            self,
            log_level=logging.INFO if settings.log_requests else logging.DEBUG,
        )

        self._first = with_admin
        self._with_admin = with_admin and settings.admin_port != 0
        self._metrics = Metrics()
        if self._with_admin:
            export_plugins(hooks, self._metrics.registry)
        self._admin: AdminServer | None = None
        self._arrivals = Arrivals(self._catalog, settings, base_models)
        self._loads = Loads()
        self._scanned = False
        self._confirmed: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop

    async def start(self) -> None:
        """Watch, list what is there, and open the admin endpoint; returns when the names are known."""
        self._loop = asyncio.get_running_loop()
        self._readiness.start()
        self._catalog.events.subscribe(self._follow)
        self._catalog.events.subscribe(CatalogEvents(self._hooks, self._catalog.get))
        if self._with_admin:
            self._admin = self._open_admin(self._loop)
        await asyncio.to_thread(self._look_at_files, at_once=True)
        self._watcher.start()
        await asyncio.to_thread(self._requested.clean)
        await asyncio.to_thread(self._watcher.first_scan, _FIRST_SCAN_SECONDS)
        self._scanned = True
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
        self._loads.stop()
        self._readiness.stop()
        self._composer.stop()
        self._leases.stop()
        if self._admin is not None:
            self._admin.stop()
            self._admin = None

    # What requests need

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

    async def select(self, name: str, scope: RequestScope, *, several: bool = False) -> StageSpec:
        """The version that a request for the name gets, once it is ready in every engine.

        Args:
            name: of the adapter.
            scope: the client's request: the version is not given up before its response has ended.
            several: the response takes several engine requests, one after the other.

        Raises:
            AdapterNotFound: no adapter of that name is served.
            AdapterRejected: with the stored reason.
            Unavailable: it is not whole yet, could not be fetched, or could not be made ready in time.
        """
        await self._arrivals.look(name)
        await self._requested.ensure(name)
        version = self._readiness.ready(name)
        now = time.monotonic()
        if version is not None and (several or now - self._confirmed.get(name, 0.0) > _CONFIRM_SECONDS):
            # The engines may have dropped it from their host caches since: a look there, no load if not.
            self._readiness.forget(version)
            version = None
        if version is None:
            version = await self._readiness.ensure(name)
            self._confirmed[name] = now
            self._metrics.staging_seconds.observe(time.monotonic() - now)
        if scope.path:
            await self._lease(version, scope, several)
        return self._readiness.spec(version)

    async def compose(
        self, name: str, parts: tuple[Part, ...], scope: RequestScope, *, several: bool = False
    ) -> StageSpec:
        """The same for adapters that are served together as one; raises as `Composer.ensure`."""
        spec = await self._composer.ensure(name, parts, confirm=several)
        if scope.path:
            await self._lease(spec, scope, several)
        return spec

    async def _lease(self, version: Version | StageSpec, scope: RequestScope, several: bool) -> None:
        scope.on_end(self._leases.take(version.id))
        if several:
            end = await self._leases.keep(version.id)
            if end is None:
                raise Unavailable(Code.NOT_READY, f"the adapter {version.name!r} was lost", hint="try again")
            scope.on_end(end)

    # What the operator can do

    async def adapters(self) -> list[AdapterView]:
        residents = Residents(await self._engines.snapshots())
        # With thousands it takes tens of milliseconds, which no stream should wait for.
        return await asyncio.to_thread(lambda: [residents.view(each) for each in self._catalog.list()])

    async def adapter(self, name: str) -> AdapterView:
        return Residents(await self._engines.snapshots()).view(self._known(name))

    async def load(self, name: str, source: HubSource | None, wait: float) -> Load:
        if source is not None:
            await self._refer(name, source)
        elif self._known(name).state is AdapterState.LISTED:
            held = (await self.adapter(name)).residency
            if held.host == held.engines > 0:
                return Load.READY
        return await self._loads.run(name, lambda: self._load(name), wait)

    async def look(self, name: str) -> None:
        """Has the catalog know what the directory and other API servers' decisions say about a name now."""
        await asyncio.to_thread(self._catalog.scan, (name,))

    async def load_from(self, name: str, place: str, *, again: bool) -> None:
        """Has it in every engine's host memory, from a place that `Arrivals.bring` knows.

        Args:
            name: the adapter's.
            place: a folder in the watched directory, or a repository.
            again: look at the files even if it is loaded.

        Raises as `Arrivals.bring`, and what a request for it would get.
        """
        await self._arrivals.bring(name, place)
        if again:
            await self.reload(name)
        if await self.load(name, None, self._settings.load_timeout_seconds) is Load.UNDER_WAY:
            raise Unavailable(Code.NOT_READY, f"the adapter {name!r} is still being loaded", hint="try again")

    async def _refer(self, name: str, source: HubSource) -> None:
        try:
            reference = HubReference(repo=source.hub, revision=source.revision or "main")
        except ValidationError:
            raise BadRequest(
                Code.BAD_REQUEST, "the source is no place on the Hub", found=f"{source.hub}@{source.revision}"
            ) from None
        try:
            await self._arrivals.refer(name, reference)
        except AdapterRejected as error:
            if error.code is Code.HUB_NOT_ALLOWED:
                raise Forbidden.of(error.reason) from error
            if error.code is Code.NAME_RESERVED:
                raise AdapterBusy.of(error.reason) from error
            raise

    async def _load(self, name: str) -> None:
        if self._known(name).state in (AdapterState.REJECTED, AdapterState.UNLOADED):
            await self.reload(name)
        await self._arrivals.settled(name)
        self._catalog.find(name)
        if (version := self._readiness.ready(name)) is not None:
            # The engines may have dropped it since.
            self._readiness.forget(version)
        await self._readiness.ensure(name)

    async def reload(self, name: str) -> None:
        await asyncio.to_thread(self._catalog.reload, name)

    async def evict(self, name: str) -> None:
        version = self._known(name).version
        if version is not None:
            self._readiness.forget(version)
            await self._engines.evict(version.id)

    async def pin(self, name: str) -> None:
        version = await self._readiness.ensure(name)
        await self._engines.pin(version.id)
        await asyncio.to_thread(self._catalog.pin, name)

    async def unpin(self, name: str) -> None:
        version = self._known(name).version
        await asyncio.to_thread(self._catalog.unpin, name)
        if version is not None:
            await self._engines.unpin(version.id)

    async def unload(self, name: str, drain: float | None = None) -> None:
        adapter = self._catalog.get(name)
        if drain is None or adapter is None or adapter.state is not AdapterState.UNLOADED:
            await asyncio.to_thread(self._catalog.unload, name)
        if drain is not None:
            await self._engines.drain(name, drain)

    async def pool(self) -> PoolView:
        return pool_view(await self._engines.snapshots())

    async def explain(self, name: str) -> ExplanationView:
        alias = self._files.aliases.value.get(name)
        if alias is not None:
            targets = alias_targets(alias)
            return ExplanationView(name=name, stands_for=targets, findings=(alias_finding(name, targets),))
        parts = self._files.compositions.value.get(name)
        composed = self._composer.known(name)
        adapter = None if parts or composed else self._known(name)
        version = composed if adapter is None else adapter.version
        snapshots = await self._engines.snapshots()
        reports = [] if version is None else await self._engines.explain(version.id)
        facts = Facts(
            None if adapter is None else Residents(snapshots).view(adapter),
            None if adapter is None else adapter.rank,
            layers_view(self._layout, reports[0]["layers"] if reports else None),
            [
                engine_facts(snapshot, str(version.id), report)
                for snapshot, report in zip(snapshots, reports, strict=False)
                if version is not None
            ],
            [other.name for other in self._catalog.list() if _same_content(other, adapter)],
        )
        return ExplanationView(
            name=name,
            stands_for=part_targets(parts or ()),
            adapter=facts.adapter,
            layers=facts.layers,
            engines=tuple(facts.engines),
            findings=findings(name, facts),
        )

    async def routing(self) -> RoutingView:
        return routing_view(self._files)

    async def measure(self) -> Snapshot:
        engines = await self._engines.measure()
        # With thousands of adapters it takes tens of milliseconds, which no stream should wait for.
        return await asyncio.to_thread(self._snapshot, engines)

    def _snapshot(self, engines: list[dict[str, Any]]) -> Snapshot:
        residents = Residents(engines)
        return Snapshot(
            [residents.view(adapter) for adapter in self._catalog.list()],
            pool_view(engines),
            [engine["usage"] for engine in engines],
            [engine["worker"] for engine in engines],
        )

    async def exposition(self) -> bytes:
        """The metrics as text, without those that the host sums up over several API servers."""
        await self._metrics.refresh(self.measure)
        shown = await asyncio.to_thread(render, self._metrics.registry, with_summed=False)
        return shown[0]

    async def config(self) -> list[SettingView]:
        return [SettingView(**row._asdict()) for row in setting_rows(os.environ)]

    async def ready(self) -> bool:
        return self._scanned

    def _look_at_files(self, *, at_once: bool = False) -> float | None:
        wait = self._files.look(at_once=at_once)
        for file in self._files.all:
            self._metrics.note_routing_file(file.name, valid=file.reason is None)
        return wait

    def _follow(self, event: Event) -> None:
        """Called on the catalog's threads, after every transition."""
        if event.kind in (EventKind.RETIRED, EventKind.REJECTED, EventKind.UNLOADED):
            self._confirmed.pop(event.name, None)
        if self._first and event.kind is EventKind.REJECTED and event.reason is not None:
            self._metrics.count_rejection(event.reason.code)
        adapter = self._catalog.get(event.name)
        if event.kind in _MAY_PIN and adapter is not None and adapter.pinned:
            # A pin is by name: it outlives a restart, a new version takes it over, another process may write
            # it to the state file.
            asyncio.run_coroutine_threadsafe(self._pin_again(event.name), self._loop)
        if event.kind is EventKind.UNPINNED and adapter is not None and adapter.version is not None:
            asyncio.run_coroutine_threadsafe(self._engines.unpin(adapter.version.id), self._loop)

    async def _pin_again(self, name: str) -> None:
        try:
            version = await self._readiness.ensure(name)
            await self._engines.pin(version.id)
        except LoraPluginError as error:
            logger.warning("adapter '%s' could not be pinned again: %s", name, error)

    def _known(self, name: str) -> Adapter:
        adapter = self._catalog.get(name)
        if adapter is None:
            raise AdapterNotFound(Code.NOT_FOUND, f"there is no adapter named {name[:100]!r}")
        return adapter

    def _open_admin(self, loop: asyncio.AbstractEventLoop) -> AdminServer:
        settings = self._settings
        bridge = LoopBridge(self, loop)
        tls = (
            server_context(settings.admin_tls_cert, settings.admin_tls_key)
            if settings.admin_tls_cert
            else None
        )
        server = AdminServer(
            lambda: create_app(
                bridge,
                tokens=Tokens(_secret(settings.admin_token), _secret(settings.admin_read_token)),
                allowed_hosts=(settings.admin_host, *settings.admin_allowed_hosts),
                metrics=self._metrics,
                events=self._catalog.events,
                plugin_routes=self._hooks.admin_routes(),
            ),
            settings.admin_host,
            settings.admin_port,
            tls,
        )
        address = server.start()
        if address is not None:
            logger.info("admin endpoint: %s://%s:%d", "https" if tls else "http", *address)
            if not tls and not is_loopback(settings.admin_host):
                logger.warning(
                    "admin endpoint: the token travels unencrypted; see LORA_PLUGIN_ADMIN_TLS_CERT"
                )
        return server


def _secret(token: SecretStr | None) -> str | None:
    return None if token is None else token.get_secret_value()


def _same_content(other: Adapter, adapter: Adapter | None) -> bool:
    if adapter is None or adapter.version is None or other.version is None or other.name == adapter.name:
        return False
    return other.version.digest == adapter.version.digest
