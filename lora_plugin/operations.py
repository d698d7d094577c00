"""What the operator can do: the admin endpoint's operations, and the host's own load and unload."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from pydantic import ValidationError

from lora_plugin.adapter.names import is_adapter_name
from lora_plugin.admin.explanation import ExplanationView
from lora_plugin.admin.models import AdapterView, HubSource, PoolView, RoutingView, SettingView
from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.entry import AdapterState
from lora_plugin.errors import (
    AdapterBusy,
    AdapterRejected,
    BodyInvalid,
    Code,
    Forbidden,
    LoraPluginError,
    Unavailable,
)
from lora_plugin.explainer import Explainer
from lora_plugin.hub.reference import HubReference
from lora_plugin.metrics import Snapshot
from lora_plugin.readiness.engines import Engines
from lora_plugin.readiness.loads import LoadOutcome, Loads
from lora_plugin.readiness.readiness import Readiness
from lora_plugin.routing.files import RoutingFiles
from lora_plugin.setting_rows import setting_rows
from lora_plugin.sources.arrivals import Arrivals
from lora_plugin.views import Residents, pool_view, routing_view


class AdapterOperations:
    """`admin.operations.Operations` over the catalog and the engines; on the API server's event loop.

    Args:
        catalog: every adapter.
        engines: the line to the engines.
        readiness: makes versions ready.
        arrivals: brings adapters into the directory.
        files: aliases and compositions.
        explainer: what may be wrong with an adapter.
        load_timeout: seconds that the host's own load waits.

    Attributes:
        scanned: whether the first scan of the directory is done.
    """

    def __init__(
        self,
        catalog: Catalog,
        engines: Engines,
        readiness: Readiness,
        arrivals: Arrivals,
        files: RoutingFiles,
        explainer: Explainer,
        load_timeout: float,
    ) -> None:
        self.scanned = False
        self._catalog = catalog
        self._engines = engines
        self._readiness = readiness
        self._arrivals = arrivals
        self._files = files
        self._explainer = explainer
        self._load_timeout = load_timeout
        self._loads = Loads()

    def stop(self) -> None:
        """Ends the loads that are under way."""
        self._loads.stop()

    async def adapters(self) -> list[AdapterView]:
        residents = Residents.of(await self._engines.snapshots())
        # With thousands it takes tens of milliseconds, which no stream should wait for.
        return await asyncio.to_thread(lambda: [residents.view(each) for each in self._catalog.list()])

    async def adapter(self, name: str) -> AdapterView:
        return Residents(await self._engines.versions(name)).view(self._catalog.known(name))

    async def load(self, name: str, source: HubSource | None, wait: float) -> LoadOutcome:
        if source is not None:
            await self._refer(name, source)
        elif self._catalog.known(name).state is AdapterState.LISTED:
            held = (await self.adapter(name)).residency
            if held.host == held.engines > 0:
                return LoadOutcome.READY
        return await self._loads.run(name, lambda: self._load(name), wait)

    async def look(self, name: str) -> None:
        """Has the catalog know what the directory and other API servers' decisions say about a name now."""
        if is_adapter_name(name):
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
        if await self.load(name, None, self._load_timeout) is LoadOutcome.UNDER_WAY:
            raise Unavailable(Code.NOT_READY, f"the adapter {name!r} is still being loaded", hint="try again")

    async def _refer(self, name: str, source: HubSource) -> None:
        try:
            reference = HubReference(repo=source.hub, revision=source.revision or "main")
        except ValidationError:
            raise BodyInvalid(
                Code.BODY_INVALID,
                "the source is no place on the Hub",
                found=f"{source.hub}@{source.revision}",
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
        if self._catalog.known(name).state in (AdapterState.REJECTED, AdapterState.UNLOADED):
            await self.reload(name)
        await self._arrivals.settled(name)
        self._catalog.find(name)
        await self._readiness.confirm(name)

    async def reload(self, name: str) -> None:
        await asyncio.to_thread(self._catalog.reload, name)

    async def evict(self, name: str) -> None:
        version = self._catalog.known(name).version
        if version is not None:
            self._readiness.forget(version)
            await self._engines.evict(version.id)

    async def pin(self, name: str) -> None:
        version = await self._readiness.confirm(name)
        try:
            await self._engines.pin(version.id)
        except LoraPluginError:
            if not self._catalog.known(name).pinned:
                # Of several engines some may have had a slab for it.
                await self._engines.unpin(version.id)
            raise
        await asyncio.to_thread(self._catalog.pin, name)

    async def unpin(self, name: str) -> None:
        version = self._catalog.known(name).version
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
        return await self._explainer.explain(name)

    async def routing(self) -> RoutingView:
        return routing_view(self._files)

    async def measure(self) -> Snapshot:
        engines = await self._engines.measure()
        # With thousands of adapters it takes tens of milliseconds, which no stream should wait for.
        return await asyncio.to_thread(self._snapshot, engines)

    def _snapshot(self, engines: list[dict[str, Any]]) -> Snapshot:
        residents = Residents.of(engines)
        return Snapshot(
            [residents.view(adapter) for adapter in self._catalog.list()],
            pool_view(engines),
            [engine["usage"] for engine in engines],
            [engine["worker"] for engine in engines],
        )

    async def config(self) -> list[SettingView]:
        # They name a directory, which is looked at: on a network file system that may take its time.
        rows = await asyncio.to_thread(setting_rows, os.environ)
        return [SettingView(**row._asdict()) for row in rows]

    async def ready(self) -> bool:
        return self.scanned
