"""The line to the engines, as all of the API server's side uses it."""

from __future__ import annotations

from typing import Any, Protocol

from lora_plugin.readiness.staging import EngineLink


class Engines(EngineLink, Protocol):
    """Every call asks all engines."""

    async def lease(self, client: str, adapter_ids: list[int], seconds: float) -> set[int]: ...

    async def drain(self, name: str, seconds: float) -> None: ...

    async def evict(self, adapter_id: int) -> None: ...

    async def pin(self, adapter_id: int) -> None: ...

    async def unpin(self, adapter_id: int) -> None: ...

    async def snapshots(self) -> list[dict[str, Any]]: ...

    async def measure(self) -> list[dict[str, Any]]: ...

    async def explain(self, adapter_id: int) -> list[dict[str, Any]]: ...
