"""What is served now, made ready for a request and kept until its response has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from lora_plugin.directory.entry import Version
from lora_plugin.errors import Code, Unavailable
from lora_plugin.hooks.types import Part
from lora_plugin.readiness.leases import Leases
from lora_plugin.readiness.readiness import Readiness
from lora_plugin.readiness.staging import StageSpec
from lora_plugin.routing.composer import Composer
from lora_plugin.routing.scope import RequestScope
from lora_plugin.sources.arrivals import Arrivals
from lora_plugin.sources.requested import RequestedAdapters


class ReadyVersions:
    """The `Versions` of a chooser; belongs to one event loop.

    Args:
        arrivals: looks at what may just have come.
        requested: fetches what a plugin knows.
        readiness: makes adapters ready.
        composer: makes compositions ready.
        leases: keep versions until a response has ended.
        waited: told of the seconds that a request waited, where it had to.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        requested: RequestedAdapters,
        readiness: Readiness,
        composer: Composer,
        leases: Leases,
        waited: Callable[[float], None],
    ) -> None:
        self._arrivals = arrivals
        self._requested = requested
        self._readiness = readiness
        self._composer = composer
        self._leases = leases
        self._waited = waited

    async def version(self, name: str) -> Version:
        """The version that is served, ready or not. Raises as `Catalog.version_of`."""
        return await self._readiness.version(name)

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
        version = None if several else self._readiness.confirmed(name)
        if version is None:
            started = time.monotonic()
            version = await self._readiness.confirm(name, soon=True)
            self._waited(time.monotonic() - started)
        await self._lease(version, scope, several)
        return self._readiness.spec(version)

    async def compose(
        self, name: str, parts: tuple[Part, ...], scope: RequestScope, *, several: bool = False
    ) -> StageSpec:
        """The same for adapters that are served together as one; raises as `Composer.ensure`."""
        spec = await self._composer.ensure(name, parts, confirm=several)
        await self._lease(spec, scope, several)
        return spec

    async def _lease(self, version: Version | StageSpec, scope: RequestScope, several: bool) -> None:
        if not scope.path:
            # Nobody will say that the response has ended.
            return
        scope.on_end(self._leases.take(version.id))
        if several:
            end = await self._leases.keep(version.id)
            if end is None:
                raise Unavailable(Code.NOT_READY, f"the adapter {version.name!r} was lost", hint="try again")
            scope.on_end(end)
