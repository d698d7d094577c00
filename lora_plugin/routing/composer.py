"""Compositions made ready: each is a version of its own, made of the versions that its parts have now."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from lora_plugin.composition import PartSource, compose
from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.entry import Version
from lora_plugin.errors import AdapterIncomplete, AdapterNotFound, BadRequest, Code, Reason, Unavailable
from lora_plugin.hooks.types import Part
from lora_plugin.readiness.flights import Flights
from lora_plugin.readiness.staging import CONFIRM_SECONDS, EngineLink, StageSpec, Staging
from lora_plugin.readiness.verdicts import look_again, too_slow, verdict

logger = logging.getLogger("lora_plugin")

_KEPT: Final = 256
"""Clients can spell any number of compositions: the engines forget those that were not asked for lately."""


class Composer:
    """Belongs to one event loop.

    Args:
        catalog: the parts' folders.
        version_of: the version of an adapter that is served; raises as `Catalog.version_of`.
        link: the line to the engines.
        ended: returns once no response of this process uses a version.
        settle_seconds: quiet time before a changed folder is read.
        max_rank: what the ranks of the parts may add up to.
        timeout: seconds that a request waits.
    """

    def __init__(
        self,
        catalog: Catalog,
        version_of: Callable[[str], Awaitable[Version]],
        link: EngineLink,
        ended: Callable[[int], Awaitable[None]],
        *,
        settle_seconds: float,
        max_rank: int,
        timeout: float,
    ) -> None:
        self._catalog = catalog
        self._version_of = version_of
        self._link = link
        self._ended = ended
        self._settle_seconds = settle_seconds
        self._max_rank = max_rank
        self._timeout = timeout
        self._staging = Staging(link)
        self._flights: Flights[None] = Flights()
        self._known: OrderedDict[str, StageSpec] = OrderedDict()
        self._ready: dict[int, float] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def ensure(self, name: str, parts: Sequence[Part], *, confirm: bool = False) -> StageSpec:
        """The composition's present version, once it is ready in every engine.

        Args:
            name: what it is called.
            parts: what it is made of.
            confirm: the engines are asked whether they still have it.

        Raises:
            AdapterNotFound: a part is not served, or not in the version that is asked for.
            AdapterRejected: a part cannot be served, or not as a part.
            BadRequest: RANK_TOO_LARGE: the parts together.
            Unavailable: it could not be made ready in time.
        """
        try:
            return await self._ensure(name, parts, confirm)
        except AdapterIncomplete:
            await look_again(self._catalog, {part.adapter for part in parts}, self._settle_seconds)
        try:
            return await self._ensure(name, parts, confirm)
        except AdapterIncomplete as error:
            raise Unavailable.of(error.reason) from error

    def known(self, name: str) -> StageSpec | None:
        """The version that was asked for last; None where that is long ago."""
        return self._known.get(name)

    def stop(self) -> None:
        """Ends all waiting; called on the event loop."""
        self._flights.cancel()

    async def _ensure(self, name: str, parts: Sequence[Part], confirm: bool) -> StageSpec:
        versions = [await self._version(part) for part in parts]
        self._check_rank(name, versions)
        sources = [
            PartSource(str(self._catalog.path_of(version.name)), version.digest, part.weight)
            for version, part in zip(versions, parts, strict=True)
        ]
        spec = compose(name, versions, sources)
        self._note(spec)
        if confirm or time.monotonic() - self._ready.get(spec.id, float("-inf")) > CONFIRM_SECONDS:
            await self._stage(spec)
        return spec

    async def _version(self, part: Part) -> Version:
        version = await self._version_of(part.adapter)
        if not version.digest.startswith(part.version or ""):
            raise AdapterNotFound(
                Code.NOT_FOUND,
                f"the adapter {part.adapter!r} is not served in the version {part.version}",
                found=f"version {version.digest[:12]}",
                hint="a part of a composition is the version that is served now",
            )
        return version

    def _check_rank(self, name: str, versions: Sequence[Version]) -> None:
        rank = sum(version.rank for version in versions)
        if rank > self._max_rank:
            raise BadRequest(
                Code.RANK_TOO_LARGE,
                f"the composition {name[:200]!r} is too large",
                expected=f"ranks that add up to at most {self._max_rank}",
                found=" + ".join(str(version.rank) for version in versions) + f" = {rank}",
                hint="leave a part out, or raise --max-lora-rank",
            )

    async def _stage(self, spec: StageSpec) -> None:
        try:
            await self._flights.join(str(spec.id), lambda: self._ask(spec), self._timeout)
        except TimeoutError:
            waits_for = self._staging.waits_for(spec.id)
            raise too_slow(f"the composition {spec.name[:200]!r}", self._timeout, waits_for) from None

    async def _ask(self, spec: StageSpec) -> None:
        status = await self._staging.stage(replace(spec, soon=True))
        if status.state == "ready":
            self._ready[spec.id] = time.monotonic()
            return
        raise verdict(status.reason or Reason(Code.CHANGED, "a part changed meanwhile", hint="try again"))

    def _note(self, spec: StageSpec) -> None:
        """What it was made of before, and what nobody asked for lately, is let go."""
        before = self._known.pop(spec.name, spec)
        self._known[spec.name] = spec
        gone = [] if before == spec else [before]
        while len(self._known) > _KEPT:
            gone.append(self._known.popitem(last=False)[1])
        for old in gone:
            self._ready.pop(old.id, None)
            task = asyncio.create_task(self._release(old))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, spec: StageSpec) -> None:
        await self._ended(spec.id)
        if self._known.get(spec.name) == spec:
            return
        try:
            await self._link.release(spec.id)
        except Exception as error:
            logger.warning("The engines were not told that %r changed: %s", spec.name, error)
