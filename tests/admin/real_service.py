"""A real service over a directory: catalog, watcher, readiness, admin endpoint; its engine is a real pool."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lora_plugin.hooks.manager import HookManager
from lora_plugin.layout import ModelLayout
from lora_plugin.pool.pool import AdapterPool
from lora_plugin.pool.usage import Usage
from lora_plugin.readiness.staging import StageSpec, StageStatus
from lora_plugin.service import Service
from lora_plugin.settings import Settings
from lora_plugin.worker.load_times import LoadTimes


class PoolEngine:
    """What an engine does for the service, with every load done at once."""

    def __init__(self) -> None:
        self.pool = AdapterPool(2, 16, 1 << 20)

    async def stage(self, adapters: list[StageSpec]) -> dict[int, StageStatus]:
        for spec in adapters:
            if self.pool.want(spec.id, spec.name, spec.digest, spec.path, spec.nbytes):
                self.pool.staged(spec.id, 4, spec.nbytes)
        self.pool.take_orders()
        return {spec.id: StageStatus("ready") for spec in adapters}

    async def lease(self, client: str, adapter_ids: list[int], seconds: float) -> set[int]:
        return set(adapter_ids)

    async def release(self, adapter_id: int) -> None:
        self.pool.retire(adapter_id)

    async def drain(self, name: str, seconds: float) -> None:
        self.pool.drain(name, seconds)

    async def evict(self, adapter_id: int) -> None:
        self.pool.evict(adapter_id)

    async def pin(self, adapter_id: int) -> None:
        self.pool.pin(adapter_id)

    async def unpin(self, adapter_id: int) -> None:
        self.pool.unpin(adapter_id)

    async def snapshots(self) -> list[dict[str, Any]]:
        return [self.pool.snapshot()]

    async def versions(self, name: str) -> list[list[dict[str, Any]]]:
        return [self.pool.versions(name)]

    async def measure(self) -> list[dict[str, Any]]:
        worker = {"seconds": LoadTimes(torch.device("cpu")).to_dict(), "plans": {}}
        return [{**self.pool.snapshot(), "usage": Usage().to_dict(), "worker": worker}]


@contextmanager
def serving(root: Path, layout: ModelLayout, **settings: Any) -> Iterator[str]:
    """The endpoint's URL, while the service runs on a loop in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    chosen = Settings(adapter_dir=root, admin_port=port, settle_seconds=0.01, **settings)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Service:
        service = Service(chosen, PoolEngine(), layout, HookManager(), base_models=["base"], with_admin=True)
        await service.start()
        return service

    service = asyncio.run_coroutine_threadsafe(start(), loop).result(60)

    async def stop() -> None:
        service.stop()

    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
