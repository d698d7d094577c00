"""Operations that live on another event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from lora_plugin.admin.explanation import ExplanationView
from lora_plugin.admin.models import AdapterView, HubSource, PoolView, RoutingView, SettingView
from lora_plugin.admin.operations import Operations
from lora_plugin.errors import Code, Unavailable
from lora_plugin.metrics import Snapshot
from lora_plugin.readiness.loads import LoadOutcome

T = TypeVar("T")


class LoopBridge:
    """`Operations` whose work runs on `loop`, called from a loop of another thread.

    A call that `loop` does not finish within `timeout` seconds is cancelled there and raises
    Unavailable; so does any call once `loop` is closed.
    """

    def __init__(
        self, operations: Operations, loop: asyncio.AbstractEventLoop, timeout: float = 10.0
    ) -> None:
        self._operations = operations
        self._loop = loop
        self._timeout = timeout

    async def adapters(self) -> list[AdapterView]:
        return await self._run(self._operations.adapters())

    async def adapter(self, name: str) -> AdapterView:
        return await self._run(self._operations.adapter(name))

    async def explain(self, name: str) -> ExplanationView:
        return await self._run(self._operations.explain(name))

    async def load(self, name: str, source: HubSource | None, wait: float) -> LoadOutcome:
        return await self._run(self._operations.load(name, source, wait), wait)

    async def reload(self, name: str) -> None:
        await self._run(self._operations.reload(name))

    async def evict(self, name: str) -> None:
        await self._run(self._operations.evict(name))

    async def pin(self, name: str) -> None:
        await self._run(self._operations.pin(name))

    async def unpin(self, name: str) -> None:
        await self._run(self._operations.unpin(name))

    async def unload(self, name: str, drain: float | None = None) -> None:
        await self._run(self._operations.unload(name, drain))

    async def pool(self) -> PoolView:
        return await self._run(self._operations.pool())

    async def routing(self) -> RoutingView:
        return await self._run(self._operations.routing())

    async def measure(self) -> Snapshot:
        return await self._run(self._operations.measure())

    async def config(self) -> list[SettingView]:
        return await self._run(self._operations.config())

    async def ready(self) -> bool:
        return await self._run(self._operations.ready())

    async def _run(self, operation: Coroutine[Any, Any, T], wait: float = 0.0) -> T:
        limit = self._timeout + wait
        try:
            future = asyncio.run_coroutine_threadsafe(operation, self._loop)
        except RuntimeError:
            operation.close()
            raise Unavailable(Code.NOT_READY, "The server is stopping") from None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), limit)
        except TimeoutError:
            raise Unavailable(
                Code.NOT_READY,
                "The server did not answer in time",
                expected=f"an answer within {limit:g} s",
                hint="it is busy or starting; try again",
            ) from None
