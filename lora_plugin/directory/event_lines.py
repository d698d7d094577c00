"""One log line per transition."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lora_plugin.directory.entry import Adapter
from lora_plugin.directory.events import Event, EventKind

logger = logging.getLogger("lora_plugin")

_LEVELS = {EventKind.DISCOVERED: logging.DEBUG, EventKind.REJECTED: logging.WARNING}


class EventLines:
    """A subscriber that logs.

    Args:
        get: what is known of an adapter now.
    """

    def __init__(self, get: Callable[[str], Adapter | None]) -> None:
        self._get = get

    def __call__(self, event: Event) -> None:
        level = _LEVELS.get(event.kind, logging.INFO)
        if logger.isEnabledFor(level):
            logger.log(level, "adapter %r %s%s", event.name, event.kind, self._details(event))

    def _details(self, event: Event) -> str:
        if event.reason is not None:
            return f": {event.reason}"
        parts = [f"version {event.version[:12]}"] if event.version else []
        adapter = self._get(event.name)
        if event.kind in (EventKind.LISTED, EventKind.UPDATED) and adapter is not None:
            parts += [f"rank {adapter.rank}", f"{adapter.nbytes} bytes", *adapter.warnings]
            parts += [f"from {adapter.source}"] if adapter.source else []
        return f" ({', '.join(parts)})" if parts else ""
