"""Makes adapters ready before anybody asks for them, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from lora_plugin.errors import LoraPluginError

logger = logging.getLogger("lora_plugin")


class Prefetcher:
    """A queue of names; failures show in the catalog, never here.

    Args:
        ensure: makes one adapter ready.
    """

    def __init__(self, ensure: Callable[[str], Awaitable[object]]) -> None:
        self._ensure = ensure
        # Ordered, and quick to look a name up in, however many appear at once.
        self._queue: OrderedDict[str, None] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str) -> None:
        """Called on the event loop; a name that waits already is not added again."""
        self._queue.setdefault(name)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    def stop(self) -> None:
        """Forgets what is queued and ends what is under way."""
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        while self._queue:
            name, _ = self._queue.popitem(last=False)
            try:
                await self._ensure(name)
            except LoraPluginError as error:
                logger.debug("prefetch of %r: %s", name, error)
            except Exception:
                logger.exception("Prefetch of %r failed unexpectedly", name)
