"""Asks the engines, for all adapters that are waited for together, until each is ready or failed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal, Protocol

from lora_plugin.errors import Reason

HOLD_SECONDS = 2.0
"""So long the engines keep a version for a request that is on its way to them."""
CONFIRM_SECONDS = 1.0
"""For so long after the engines said that a version is ready they are not asked again."""
_FIRST_PAUSE = 0.005
_LAST_PAUSE = 0.050
_GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A version to stage, as it is sent to the engines.

    Attributes:
        id: the `lora_int_id`.
        name: the adapter.
        digest: the version's content; a stager that reads anything else fails with CHANGED.
        path: the adapter's folder; of a composition, its parts (`composition.py`).
        nbytes: bytes once packed, on one rank: an estimate for the host cache.
        soon: a request follows: once staged, it may be brought to the device before that arrives.
    """

    id: int
    name: str
    digest: str
    path: str
    nbytes: int
    soon: bool = False


@dataclass(frozen=True, slots=True)
class StageStatus:
    """How a version stands in the engines.

    Attributes:
        state: staging, waiting (for room), ready in every engine, or failed.
        reason: why it waits or failed.
    """

    state: Literal["staging", "ready", "failed", "waiting"]
    reason: Reason | None = None


class EngineLink(Protocol):
    """The line to the engines."""

    async def stage(self, adapters: list[StageSpec]) -> dict[int, StageStatus]:
        """Starts to stage what is not, and says how each stands, by id. Never waits; may be repeated."""
        ...

    async def room(self) -> int:
        """Bytes of the host caches that are free in every engine."""
        ...

    async def release(self, adapter_id: int) -> None:
        """The version is served no longer; may be repeated."""
        ...


@dataclass(slots=True)
class _Waiter:
    spec: StageSpec
    outcome: asyncio.Future[StageStatus]
    reason: Reason | None = None


class Staging:
    """One loop asks for all waiting versions at once, so that many cold adapters cost no more questions."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._waiters: dict[int, _Waiter] = {}
        self._arrived = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def stage(self, spec: StageSpec) -> StageStatus:
        """Its status once that is `ready` or `failed`; one caller per version at a time."""
        waiter = _Waiter(spec, asyncio.get_running_loop().create_future())
        self._waiters[spec.id] = waiter
        self._arrived.set()
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._ask_all())
        try:
            return await waiter.outcome
        finally:
            self._drop(waiter)

    def abandon(self, adapter_id: int) -> None:
        """Ends the wait for a version that is wanted no longer; its caller gets `failed` without a reason."""
        if (waiter := self._waiters.get(adapter_id)) is not None:
            self._settle(waiter, StageStatus("failed"))

    def waits_for(self, adapter_id: int) -> Reason | None:
        """What the engines last said that a version is waiting for."""
        waiter = self._waiters.get(adapter_id)
        return waiter.reason if waiter else None

    async def _ask_all(self) -> None:
        pause = _FIRST_PAUSE
        while self._waiters:
            if self._arrived.is_set():
                self._arrived.clear()
                pause = _FIRST_PAUSE
            await self._ask(list(self._waiters.values()))
            try:
                await asyncio.wait_for(self._arrived.wait(), pause)
            except TimeoutError:
                pause = min(pause * _GROWTH, _LAST_PAUSE)

    async def _ask(self, waiters: list[_Waiter]) -> None:
        try:
            statuses = await self._link.stage([waiter.spec for waiter in waiters])
        except Exception as error:
            for waiter in waiters:
                self._drop(waiter)
                if not waiter.outcome.done():
                    waiter.outcome.set_exception(error)
            return
        for waiter in waiters:
            status = statuses.get(waiter.spec.id, StageStatus("staging"))
            waiter.reason = status.reason
            if status.state in ("ready", "failed"):
                self._settle(waiter, status)

    def _settle(self, waiter: _Waiter, status: StageStatus) -> None:
        self._drop(waiter)
        if not waiter.outcome.done():
            waiter.outcome.set_result(status)

    def _drop(self, waiter: _Waiter) -> None:
        if self._waiters.get(waiter.spec.id) is waiter:
            del self._waiters[waiter.spec.id]
