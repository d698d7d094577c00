"""What happens to adapters, told to the plugins."""

from __future__ import annotations

from collections.abc import Callable

from lora_plugin.directory import entry
from lora_plugin.directory.events import Event, EventKind
from lora_plugin.hooks import Adapter
from lora_plugin.hooks.manager import HookManager
from lora_plugin.pool.entry import Entry
from lora_plugin.pool.orders import Load, Orders


class CatalogEvents:
    """A subscriber of the catalog's events.

    Args:
        hooks: whom to tell.
        get: what is known of an adapter now.
    """

    def __init__(self, hooks: HookManager, get: Callable[[str], entry.Adapter | None]) -> None:
        self._get = get
        self._tell = {
            EventKind.DISCOVERED: hooks.adapter_discovered,
            EventKind.REJECTED: hooks.adapter_rejected,
            EventKind.LISTED: hooks.adapter_ready,
            EventKind.UPDATED: hooks.adapter_ready,
            EventKind.UNLOADED: hooks.adapter_retired,
            EventKind.RETIRED: hooks.adapter_retired,
        }

    def __call__(self, event: Event) -> None:
        if (tell := self._tell.get(event.kind)) is None:
            return
        known = self._get(event.name)
        reason = None if event.reason is None else str(event.reason)
        tell(Adapter(event.name, event.version, known.rank if known else None, reason))


class DeviceEvents:
    """Follows an engine's orders to its workers: which versions get rows on the device, which lose them.

    Args:
        hooks: whom to tell.
        get: what the pool knows of a version.
    """

    def __init__(self, hooks: HookManager, get: Callable[[int], Entry | None]) -> None:
        self._hooks = hooks
        self._get = get
        self._active: dict[int, Adapter] = {}

    def follow(self, orders: Orders) -> None:
        """Tell of orders that are on their way; on the engine's thread."""
        for order in orders:
            if isinstance(order, Load):
                self._activate(order.adapter_id)
            elif (adapter := self._active.pop(order.adapter_id, None)) is not None:
                self._hooks.adapter_evicted(adapter)

    def _activate(self, adapter_id: int) -> None:
        known = self._get(adapter_id)
        if known is not None and adapter_id not in self._active:
            self._active[adapter_id] = Adapter(known.name, known.digest or None)
            self._hooks.adapter_activated(self._active[adapter_id])
