"""Shared work: many callers wait for one task, and none of them can end it for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lora_plugin.errors import Code, Unavailable

T = TypeVar("T")


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class Flights(Generic[T]):
    """At most one task per key; it ends early only when its last waiter gives up."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    async def join(self, key: str, work: Callable[[], Coroutine[Any, Any, T]], timeout: float) -> T:
        """The result of the key's task, started with `work` if there is none.

        Raises:
            TimeoutError: after `timeout` seconds of this caller's waiting.
            Unavailable: NOT_READY: all tasks were ended by `cancel`.
            Exception: what the task raised, for every waiter.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(work()))
            flight.task.add_done_callback(lambda _: self._end(key, flight))
        flight.waiters += 1
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if flight.task.cancelled() and caller is not None and not caller.cancelling():
                raise Unavailable(Code.NOT_READY, "the server is shutting down") from None
            raise
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                flight.task.cancel()
                self._end(key, flight)

    def cancel(self) -> None:
        """Ends every task; who waits for one is told so."""
        for flight in self._flights.values():
            flight.task.cancel()

    def _end(self, key: str, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            # Marks a failure as seen where every caller has given up.
            flight.task.exception()
