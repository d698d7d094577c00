"""Loads that the operator asked for: they go on when the one who asked no longer waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any


class LoadOutcome(Enum):
    """How a load stands when it is no longer waited for."""

    READY = "it was loaded already"
    DONE = "it is loaded now"
    UNDER_WAY = "it is being loaded"


class Loads:
    """At most one load per name; on one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[object]] = {}

    async def run(
        self, name: str, work: Callable[[], Coroutine[Any, Any, object]], wait: float
    ) -> LoadOutcome:
        """Starts `work`, unless the name's is under way, and waits for it for so many seconds at most.

        Raises what `work` raised, if that was within the time.
        """
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._end(name, done))
        await asyncio.wait({task}, timeout=wait)
        if not task.done():
            return LoadOutcome.UNDER_WAY
        if task.cancelled():
            raise asyncio.CancelledError
        task.result()
        return LoadOutcome.DONE

    def stop(self) -> None:
        """Ends every load that is under way."""
        for task in self._tasks.values():
            task.cancel()

    def _end(self, name: str, task: asyncio.Task[object]) -> None:
        del self._tasks[name]
        if not task.cancelled():
            # Marks a failure as seen where nobody waits any more.
            task.exception()
