"""What the admin endpoint can do, as the serving side implements it."""

from __future__ import annotations

from typing import Protocol

from lora_plugin.admin.explanation import ExplanationView
from lora_plugin.admin.models import AdapterView, HubSource, PoolView, RoutingView, SettingView
from lora_plugin.metrics import Snapshot
from lora_plugin.readiness.loads import LoadOutcome


class Operations(Protocol):
    """The operations behind the routes.

    Refusals are `LoraPluginError`s: AdapterNotFound for an unknown name, AdapterBusy for one that is in
    use or pinned, Unavailable when an engine does not answer or has no room.
    """

    async def adapters(self) -> list[AdapterView]:
        """Every adapter known, sorted by name, rejected and unloaded ones included."""
        ...

    async def adapter(self, name: str) -> AdapterView:
        """One adapter; it stays visible after `unload`."""
        ...

    async def explain(self, name: str) -> ExplanationView:
        """What may be wrong with an adapter, an alias or a composition."""
        ...

    async def load(self, name: str, source: HubSource | None, wait: float) -> LoadOutcome:
        """Have it in every engine's host memory, waiting `wait` seconds at most; takes back `unload`.

        Raises Forbidden for a source that is not allowed, and what a request for it would get.
        """
        ...

    async def reload(self, name: str) -> None:
        """Look at its files again, whatever was decided or found before."""
        ...

    async def evict(self, name: str) -> None:
        """Out of device and host memory in every engine; the next request loads it again."""
        ...

    async def pin(self, name: str) -> None:
        """Keep it on the device."""
        ...

    async def unpin(self, name: str) -> None:
        """Let it be evicted again."""
        ...

    async def unload(self, name: str, drain: float | None = None) -> None:
        """Stop serving it until its files change.

        Requests under way finish; with `drain` those that are not done after so many seconds are ended, 0: at
        once. That may be said later, too, of one that is unloaded already.
        """
        ...

    async def pool(self) -> PoolView:
        """The pools of all engines."""
        ...

    async def routing(self) -> RoutingView:
        """Aliases, compositions, and how their files stand."""
        ...

    async def measure(self) -> Snapshot:
        """What metrics show of the catalog and the engines."""
        ...

    async def config(self) -> list[SettingView]:
        """The settings in force."""
        ...

    async def ready(self) -> bool:
        """Whether the first scan of the directory is done."""
        ...
