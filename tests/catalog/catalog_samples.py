"""A model of one layer, tiny adapters for it on disk, a clock that tests move, an engine link in memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors.torch import save

from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.folders import AdapterFolders
from lora_plugin.errors import Code, Reason
from lora_plugin.hub.folders import HubFolders
from lora_plugin.layout import Kind, Layer, ModelLayout, Slice
from lora_plugin.readiness.staging import StageSpec, StageStatus
from lora_plugin.settings import Settings

WIDTH = 8
SETTLE = 0.2
MAX_BYTES = 2 << 30
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PROJECTION = "model.layers.0.self_attn.q_proj"
LAYOUT = ModelLayout(
    layers=(Layer(_PROJECTION, Kind.LINEAR, (Slice(_PROJECTION, WIDTH, WIDTH, (0, WIDTH), (0, WIDTH)),)),),
    dtype="float32",
    max_rank=16,
    unwrapped={},
)


def config_bytes(rank: int = 4, **changes: object) -> bytes:
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], **changes}
    return json.dumps(content).encode()


def weight_bytes(seed: int = 0, rank: int = 4) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    prefix = f"base_model.model.{_PROJECTION}"
    return save(
        {
            f"{prefix}.lora_A.weight": torch.randn(rank, WIDTH, generator=generator),
            f"{prefix}.lora_B.weight": torch.randn(WIDTH, rank, generator=generator),
        }
    )


def write_adapter(folder: Path, seed: int = 0, rank: int = 4) -> None:
    """In place, as a copy of the two files does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_bytes(config_bytes(rank))
    (folder / WEIGHTS).write_bytes(weight_bytes(seed, rank))


def folders_of(
    root: Path,
    *,
    taken: Collection[str] = (),
    allow: Collection[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> HubFolders:
    """What lies in a directory, with references to the Hub."""
    plain = AdapterFolders(root, LAYOUT, taken=taken, max_bytes=MAX_BYTES)
    return HubFolders(plain, root, taken=taken, allow=allow, max_bytes=MAX_BYTES, clock=clock)


def catalog_of(settings: Settings, *taken: str) -> Catalog:
    """The catalog that the service makes of these settings."""
    folders = HubFolders.from_settings(settings, LAYOUT, taken)
    return Catalog(settings.adapter_dir, folders, settle_seconds=settings.settle_seconds)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A directory, its catalog and its clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.catalog = self.another()

    def another(self) -> Catalog:
        """The catalog of one more API server."""
        folders = folders_of(self.root, taken=("base",), clock=self.clock)
        return Catalog(self.root, folders, settle_seconds=SETTLE, clock=self.clock, now=lambda: 5.0)

    def settle(self, seconds: float = SETTLE) -> None:
        """Scans, lets the settle time pass, and scans again."""
        self.catalog.scan()
        self.clock.now += seconds + 0.001
        self.catalog.scan()

    def state(self, name: str) -> str | None:
        adapter = self.catalog.get(name)
        return None if adapter is None else str(adapter.state)

    def kinds(self, name: str) -> list[str]:
        return [str(event.kind) for event in self.catalog.events.since() if event.name == name]


class MemoryLink:
    """Engines that are ready after a number of questions, and whose answers a test can replace."""

    def __init__(self, questions: int = 2) -> None:
        self.questions = questions
        self.asked: list[StageSpec] = []
        self.started: list[int] = []
        self.released: list[int] = []
        self.free = 1 << 30
        self.answer: Callable[[StageSpec], StageStatus | None] = lambda spec: None
        self.open = asyncio.Event()
        self.open.set()

    async def stage(self, adapters: list[StageSpec]) -> dict[int, StageStatus]:
        await asyncio.sleep(0)
        return {spec.id: self._status(spec) for spec in adapters}

    async def room(self) -> int:
        return self.free

    async def release(self, adapter_id: int) -> None:
        self.released.append(adapter_id)

    def _status(self, spec: StageSpec) -> StageStatus:
        self.asked.append(spec)
        if spec.id not in self.started:
            self.started.append(spec.id)
        if (answer := self.answer(spec)) is not None:
            return answer
        often = sum(asked.id == spec.id for asked in self.asked)
        done = often >= self.questions and self.open.is_set()
        return StageStatus("ready" if done else "staging")


NAN = Reason(Code.NOT_FINITE, "lora_A holds NaN")
