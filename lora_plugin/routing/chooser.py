"""The version that a request is given: routed, allowed, and ready."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.entry import Version
from lora_plugin.errors import AdapterIncomplete, AdapterNotFound, AdapterRejected, Code, Unavailable
from lora_plugin.extensions.access import check_access
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hooks.types import Part, Request
from lora_plugin.readiness.leases import Leases
from lora_plugin.readiness.staging import StageSpec
from lora_plugin.routing.held import find_held
from lora_plugin.routing.router import Route, Router
from lora_plugin.routing.scope import Chosen, RequestScope

logger = logging.getLogger("lora_plugin")

_NOT_SERVED = (AdapterIncomplete, AdapterNotFound, AdapterRejected, Unavailable)


class Engines(Protocol):
    """What of the engines is needed to find older versions."""

    async def versions(self, name: str) -> list[list[dict[str, Any]]]: ...


class Versions(Protocol):
    """What is served now: its version, made ready, and leased until the response has ended."""

    async def version(self, name: str) -> Version: ...

    async def select(self, name: str, scope: RequestScope, *, several: bool) -> StageSpec: ...

    async def compose(
        self, name: str, parts: tuple[Part, ...], scope: RequestScope, *, several: bool
    ) -> StageSpec: ...


class Chooser:
    """Chooses for every request, on the event loop.

    Args:
        router: from the request to the name.
        hooks: who may refuse.
        catalog: the names.
        engines: where older versions may still be.
        leases: keep versions until a response has ended.
        versions: makes what is served ready.
        log_level: of the line for each request.
    """

    def __init__(
        self,
        router: Router,
        hooks: HookManager,
        catalog: Catalog,
        engines: Engines,
        leases: Leases,
        versions: Versions,
        *,
        log_level: int = logging.DEBUG,
    ) -> None:
        self._router = router
        self._hooks = hooks
        self._catalog = catalog
        self._engines = engines
        self._leases = leases
        self._versions = versions
        self._log_level = log_level

    async def choose(self, request: Request, scope: RequestScope, *, several: bool = False) -> Chosen:
        """What the request gets, once it is ready in every engine.

        Args:
            request: what the client says.
            scope: the client's request: the version is not given up before its response has ended.
            several: the response takes several engine requests, one after the other.

        Raises:
            BadRequest: it names two adapters, or a composition that is too large.
            Refused: a plugin does not let it have the adapter.
            AdapterNotFound: nothing is served under the name, or not the version.
            AdapterRejected: with the stored reason.
            Unavailable: it is not whole yet, or could not be made ready in time.
        """
        started = time.monotonic()
        route = self._router.route(request)
        self._authorize(request, route)
        try:
            chosen = Chosen(await self._version(route, scope, several), route.asked)
        except _NOT_SERVED as error:
            if not route.fallback:
                raise
            logger.debug("%r falls back to the base model: %s", route.asked, error)
            chosen = Chosen(None, route.asked)
        self._log(request, chosen, started)
        return chosen

    def check(self, request: Request) -> None:
        """Raises what `choose` would, as far as it can be known without loading anything."""
        route = self._router.route(request)
        self._authorize(request, route)
        if not route.fallback:
            for name in route.names:
                self._catalog.find(name)

    def _authorize(self, request: Request, route: Route) -> None:
        for name in route.names:
            check_access(self._hooks, request, name)

    async def _version(self, route: Route, scope: RequestScope, several: bool) -> StageSpec | None:
        if route.adapter is None:
            return None
        if route.parts:
            return await self._versions.compose(route.adapter, route.parts, scope, several=several)
        if route.version is None:
            return await self._versions.select(route.adapter, scope, several=several)
        served = await self._versions.version(route.adapter)
        if served.digest.startswith(route.version):
            spec = await self._versions.select(route.adapter, scope, several=several)
            # It may have been updated while it was waited for.
            if spec.digest.startswith(route.version):
                return spec
        return await self._older(route.adapter, route.version, served, scope)

    async def _older(self, name: str, version: str, served: Version, scope: RequestScope) -> StageSpec:
        path = str(self._catalog.path_of(name))
        held = find_held(await self._engines.versions(name), name, version, path)
        end = None if held is None else await self._leases.keep(held.id)
        if held is None or end is None:
            raise AdapterNotFound(
                Code.NOT_FOUND,
                f"the adapter {name!r} is not served in the version {version}",
                found=f"version {served.digest[:12]}",
                hint="older versions stay only as long as requests use them",
            )
        if scope.path:
            scope.on_end(self._leases.take(held.id))
            scope.on_end(end)
        else:
            # Nobody will say that the response has ended.
            end()
        return held

    def _log(self, request: Request, chosen: Chosen, started: float) -> None:
        if logger.isEnabledFor(self._log_level):
            waited = (time.monotonic() - started) * 1e3
            request_id = request.headers.get("x-request-id", "")[:64] or "(no id)"
            logger.log(
                self._log_level,
                "request %s to %s: asked for %r, gets %s after %.0f ms",
                # A client's words: whatever could begin a line, or steer a terminal, is escaped.
                request_id if request_id.isprintable() else ascii(request_id),
                request.path or "(no path)",
                chosen.asked[:200],
                chosen.label,
                waited,
            )
