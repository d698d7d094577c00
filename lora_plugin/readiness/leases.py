"""Which versions the responses under way use, so that none is given up between two of its engine requests."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("lora_plugin")

LEASE_SECONDS = 30.0
"""An API server that dies keeps versions in the engines for so long."""
_RENEW_SECONDS = LEASE_SECONDS / 3


class LeaseLink(Protocol):
    """The part of the line to the engines that leases need."""

    async def lease(self, client: str, adapter_ids: list[int], seconds: float) -> set[int]:
        """Keeps ready versions in every engine for so long, or 0: no longer; returns those that are kept."""
        ...


class Leases:
    """Counts responses by version; belongs to one event loop.

    While a response uses a version this process does not tell the engines that the version is retired. That
    is enough for one engine request, which the engine counts from its arrival on. A response of several
    (beam search, tool turns) has the engines keep it too, against eviction and other API servers' word.

    Args:
        link: the line to the engines.
    """

    def __init__(self, link: LeaseLink) -> None:
        self._link = link
        self._client = uuid.uuid4().hex
        self._responses: Counter[int] = Counter()
        self._kept: Counter[int] = Counter()
        self._ended: dict[int, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewal: asyncio.Task[None] | None = None

    def take(self, version_id: int) -> Callable[[], None]:
        """A response uses the version until the answer is called; once is enough."""
        self._responses[version_id] += 1
        return _once(lambda: self._end(version_id))

    async def keep(self, version_id: int) -> Callable[[], None] | None:
        """The engines keep the version until the answer is called; None: one of them has lost it."""
        self._kept[version_id] += 1
        try:
            kept = await self._link.lease(self._client, [version_id], LEASE_SECONDS)
        except BaseException:
            self._let_go(version_id)
            raise
        if version_id not in kept:
            self._let_go(version_id)
            return None
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())
        return _once(lambda: self._let_go(version_id))

    async def ended(self, version_id: int) -> None:
        """Returns once no response of this process uses the version."""
        if self._responses[version_id]:
            await self._ended.setdefault(version_id, asyncio.Event()).wait()

    def stop(self) -> None:
        """What the engines keep runs out by itself."""
        for task in (self._renewal, *self._tasks):
            if task is not None:
                task.cancel()

    def _end(self, version_id: int) -> None:
        self._responses[version_id] -= 1
        if not self._responses[version_id]:
            del self._responses[version_id]
            if (event := self._ended.pop(version_id, None)) is not None:
                event.set()

    def _let_go(self, version_id: int) -> None:
        self._kept[version_id] -= 1
        if not self._kept[version_id]:
            del self._kept[version_id]
            task = asyncio.create_task(self._tell([version_id], 0))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            if not self._kept:
                return
            await self._tell(sorted(self._kept), LEASE_SECONDS)

    async def _tell(self, version_ids: list[int], seconds: float) -> None:
        try:
            await self._link.lease(self._client, version_ids, seconds)
        except Exception as error:
            logger.warning("The engines were not told which adapters responses use: %s", error)


def _once(function: Callable[[], None]) -> Callable[[], None]:
    called = False

    def call() -> None:
        nonlocal called
        if not called:
            called = True
            function()

    return call
