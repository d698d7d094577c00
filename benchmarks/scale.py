"""Thousands of adapters in the watched directory: start-up, rescans, lists, and a drop of all at once.

The whole API server's side runs, admin endpoint included, over engines that hold whatever is asked.
Everything is CPU time, so that others on the machine do not count. "Loop" is the longest piece of work of the
event loop, which every stream waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from random_adapter import write_folder
from servers import free_port

from lora_plugin.hooks.manager import HookManager
from lora_plugin.layout import Kind, Layer, ModelLayout, Slice
from lora_plugin.pool.pool import AdapterPool
from lora_plugin.pool.usage import Usage
from lora_plugin.readiness.staging import StageSpec, StageStatus
from lora_plugin.service import Service
from lora_plugin.settings import Settings
from lora_plugin.worker.load_times import LoadTimes

MODULES = [f"model.layers.{i}.self_attn.{name}" for i in range(4) for name in ("q_proj", "v_proj")]
WIDTH = 64
LAYOUT = ModelLayout(
    layers=tuple(
        Layer(name, Kind.LINEAR, (Slice(name, WIDTH, WIDTH, (0, WIDTH), (0, WIDTH)),)) for name in MODULES
    ),
    dtype="bfloat16",
    max_rank=64,
    unwrapped={},
)


class Engines:
    """One engine's pool, with every load done at once."""

    def __init__(self) -> None:
        self._pool = AdapterPool(4, 64, 4 << 30)

    async def stage(self, adapters: list[StageSpec]) -> dict[int, StageStatus]:
        for spec in adapters:
            if self._pool.want(spec.id, spec.name, spec.digest, spec.path, spec.nbytes):
                self._pool.staged(spec.id, 8, spec.nbytes)
        self._pool.take_orders()
        return {spec.id: StageStatus("ready") for spec in adapters}

    async def room(self) -> int:
        return self._pool.host_free

    async def lease(self, client: str, adapter_ids: list[int], seconds: float) -> set[int]:
        return set(adapter_ids)

    async def release(self, adapter_id: int) -> None:
        self._pool.retire(adapter_id)

    async def snapshots(self) -> list[dict[str, Any]]:
        return [self._pool.snapshot()]

    async def measure(self) -> list[dict[str, Any]]:
        worker = {"seconds": LoadTimes(torch.device("cpu")).to_dict(), "plans": {}}
        return [{**self._pool.snapshot(), "usage": Usage().to_dict(), "worker": worker}]


@dataclass
class Loop:
    """The longest piece of work of the event loop's thread since it was last asked, in CPU seconds."""

    longest: float = 0.0
    _task: asyncio.Task[None] | None = field(default=None, repr=False)

    async def watch(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest = max(self.longest, time.thread_time() - before)

    def take(self) -> float:
        longest, self.longest = self.longest, 0.0
        return longest


@contextlib.asynccontextmanager
async def watched_loop() -> AsyncIterator[Loop]:
    loop = Loop()
    task = asyncio.create_task(loop.watch())
    try:
        yield loop
    finally:
        task.cancel()


def copy_adapters(source: Path, root: Path, count: int) -> None:
    """One after the other, as fast as can be: each appears by a rename."""
    for i in range(count):
        draft = root / f".draft-{i}"
        shutil.copytree(source, draft)
        draft.rename(root / f"adapter-{i:05}")


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.process_time()
    yield
    seconds[name] = time.process_time() - started


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def measure(count: int) -> dict[str, float]:
    """CPU seconds by what was done; the loop's longest piece of it as `... loop`; memory in MB."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "adapters"
        root.mkdir()
        source = Path(folder) / "source"
        write_folder(dict.fromkeys(MODULES, (WIDTH, WIDTH)), source, 8, seed=0, base="model")
        await asyncio.to_thread(copy_adapters, source, root, count)
        settings = Settings(adapter_dir=root, admin_port=free_port(), rescan_seconds=3600, prefetch=False)
        async with watched_loop() as loop:
            before = peak_megabytes()
            service = make_service(settings)
            loop.take()
            with timed(figures, "start"):
                await service.start()
                await until(lambda: len(service.names()) == count)
            figures["start loop"] = loop.take()
            figures["memory"] = peak_megabytes() - before
            await lists(service, settings.admin_port, loop, figures)
            await rescan(service, loop, figures)
            service.stop()
            await drop(source, Path(folder) / "others", count, loop, figures)
    return figures


def make_service(settings: Settings) -> Service:
    return Service(settings, Engines(), LAYOUT, HookManager([]), base_models=("model",), with_admin=True)  # type: ignore[arg-type]


async def lists(service: Service, port: int, loop: Loop, figures: dict[str, float]) -> None:
    with timed(figures, "names"):
        service.names()
    loop.take()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        for name, path in (("page", "/v1/adapters?limit=100"), ("metrics", "/metrics")):
            with timed(figures, name):
                async with client.get(path) as response:
                    response.raise_for_status()
                    await response.read()
            figures[f"{name} loop"] = loop.take()


async def rescan(service: Service, loop: Loop, figures: dict[str, float]) -> None:
    catalog = service._catalog
    loop.take()
    with timed(figures, "rescan"):
        await asyncio.to_thread(catalog.scan)
    figures["rescan loop"] = loop.take()


def delete_all(root: Path) -> None:
    for folder in root.glob("adapter-*"):
        shutil.rmtree(folder)


async def drop(source: Path, root: Path, count: int, loop: Loop, figures: dict[str, float]) -> None:
    root.mkdir()
    service = make_service(Settings(adapter_dir=root, admin_port=0))
    await service.start()
    loop.take()
    with timed(figures, "drop"):
        writing = asyncio.to_thread(copy_adapters, source, root, count)
        await asyncio.gather(writing, until(lambda: len(service.names()) == count))
    figures["drop loop"] = loop.take()
    with timed(figures, "delete"):
        await asyncio.gather(asyncio.to_thread(delete_all, root), until(lambda: not service.names()))
    figures["delete loop"] = loop.take()
    service.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[500, 2000, 10000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = {}
    for count in options.counts:
        table[count] = asyncio.run(measure(count))
        print(count, {key: round(value, 4) for key, value in table[count].items()}, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"cpus": os.cpu_count(), "figures": table}, indent=1))


if __name__ == "__main__":
    main()
