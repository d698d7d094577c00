"""The API server's line to its engines: plain calls and answers, every engine asked."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from typing import Any

from lora_plugin.errors import (
    AdapterBusy,
    AdapterNotFound,
    AdapterRejected,
    LoraPluginError,
    Reason,
    Unavailable,
)
from lora_plugin.layout import ModelLayout
from lora_plugin.readiness.staging import StageSpec, StageStatus

_BY_STATUS: dict[int, type[LoraPluginError]] = {
    400: AdapterRejected,
    404: AdapterNotFound,
    409: AdapterBusy,
    503: Unavailable,
}


class EngineLink:
    """Calls the plugin's utility method of every engine behind a client.

    Args:
        engine_client: the host's `AsyncLLM`.
    """

    def __init__(self, engine_client: Any) -> None:
        self._core = engine_client.engine_core

    async def layout(self) -> ModelLayout:
        """The model's layout; sizes are the whole model's, shards the first rank's."""
        return ModelLayout.from_dict((await self._call("layout", {}))[0])

    async def stage(self, adapters: list[StageSpec]) -> dict[int, StageStatus]:
        """Start to stage, or ask how it goes; an adapter is ready when it is in every engine."""
        # Of several engines the request goes to one: the others would make room for nothing.
        alone = len(self._core.core_engines) == 1
        specs = [asdict(replace(spec, soon=spec.soon and alone)) for spec in adapters]
        replies = await self._call("stage", {"adapters": specs})
        return {spec.id: _worst([_status(reply[str(spec.id)]) for reply in replies]) for spec in adapters}

    async def release(self, adapter_id: int) -> None:
        """The version is served no longer: let it go when its last request ends."""
        await self._call("release", {"id": adapter_id})

    async def room(self) -> int:
        """Bytes of host memory that are free in every engine."""
        return int(min(await self._call("room", {})))

    async def lease(self, client: str, adapter_ids: list[int], seconds: float) -> set[int]:
        """Keep ready versions for the responses of an API server; returns those that every engine keeps."""
        payload = {"client": client, "ids": adapter_ids, "seconds": seconds}
        return set.intersection(*map(set, await self._call("lease", payload)))

    async def drain(self, name: str, seconds: float) -> None:
        """Retire every version of a name; requests that still run after so long are ended."""
        await self._call("drain", {"name": name, "seconds": seconds})

    async def evict(self, adapter_id: int) -> None:
        await self._call("evict", {"id": adapter_id})

    async def pin(self, adapter_id: int) -> None:
        await self._call("pin", {"id": adapter_id})

    async def unpin(self, adapter_id: int) -> None:
        await self._call("unpin", {"id": adapter_id})

    async def adapter_requests(self) -> list[dict[str, Any]]:
        """Per engine the names of adapters with running and waiting requests, and its slabs."""
        return await self._call("requests", {})

    async def snapshots(self) -> list[dict[str, Any]]:
        """Every engine's pool, as `AdapterPool.snapshot` gives it."""
        return await self._call("snapshot", {})

    async def versions(self, name: str) -> list[list[dict[str, Any]]]:
        """What `snapshots` has of one adapter's versions, for every engine."""
        return await self._call("versions", {"name": name})

    async def measure(self) -> list[dict[str, Any]]:
        """The same with what only metrics need: `usage`, and `worker` of the first rank."""
        return await self._call("measure", {})

    async def explain(self, adapter_id: int) -> list[dict[str, Any]]:
        """What every engine's first worker knows of an adapter."""
        return await self._call("explain", {"id": adapter_id})

    async def _call(self, command: str, payload: dict[str, Any]) -> list[Any]:
        core = self._core
        text = json.dumps(payload)
        texts = await asyncio.gather(
            *(
                core._call_utility_async("lora_plugin_call", command, text, engine=engine)
                for engine in core.core_engines
            )
        )
        replies = [json.loads(text) for text in texts]
        for reply in replies:
            if "error" in reply:
                error = _BY_STATUS.get(reply["status"], LoraPluginError)
                raise error.of(Reason.from_dict(reply["error"]))
        return [reply["result"] for reply in replies]


def _status(reply: dict[str, Any]) -> StageStatus:
    reason = Reason.from_dict(reply["reason"]) if "reason" in reply else None
    # Absent: lost again at once; it is asked for anew.
    state: Any = "staging" if reply["state"] == "absent" else reply["state"]
    return StageStatus(state, reason)


def _worst(statuses: list[StageStatus]) -> StageStatus:
    order = ("failed", "waiting", "staging", "ready")
    return min(statuses, key=lambda status: order.index(status.state))
