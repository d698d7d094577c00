"""A plugin that implements every hook, and writes down what it sees: one file of JSON lines per process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter

from lora_plugin.hooks import (
    Adapter,
    Batch,
    Compute,
    LinearLayer,
    Refusal,
    Request,
    Selection,
    Source,
    WaitingRequest,
    hookimpl,
)

DOUBLED = "model.layers.1.mlp.down_proj"
ALONE = "beta"


def root() -> Path:
    return Path(os.environ["LORA_PLUGIN_ADAPTER_DIR"]).parent


def record(hook: str, **facts: Any) -> None:
    folder = root() / "record"
    folder.mkdir(exist_ok=True)
    with (folder / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"hook": hook, "pid": os.getpid(), **facts}) + "\n")


@hookimpl
def select_adapter(request: Request) -> Selection | None:
    picked = request.headers.get("x-pick")
    return Selection(picked) if picked else None


@hookimpl
def authorize(request: Request, adapter: str) -> Refusal | None:
    fields = sorted(request.fields)
    record("authorize", adapter=adapter, model=request.model, path=request.path, fields=fields)
    if adapter == "delta" and request.headers.get("x-team") != "us":
        return Refusal("delta is ours")
    return None


@dataclass(frozen=True)
class Stored:
    """A folder beside the watched directory."""

    folder: Path

    @property
    def description(self) -> str:
        return self.folder.name

    def fetch(self, destination: Path) -> None:
        shutil.copytree(self.folder, destination, dirs_exist_ok=True)


@hookimpl
def resolve_source(name: str) -> Source | None:
    record("resolve_source", name=name)
    folder = root() / "store" / name
    return Stored(folder) if folder.is_dir() else None


@hookimpl
def admit(batch_so_far: Sequence[str | None], request: WaitingRequest) -> bool | None:
    record("admit", adapter=request.adapter, tokens=request.tokens, waited=request.waited)
    return not (request.adapter == ALONE and ALONE in batch_so_far)


@hookimpl
def batch_built(batch: Batch) -> None:
    record("batch_built", **asdict(batch))


@hookimpl
def make_linear(layer: LinearLayer) -> Compute | None:
    record("make_linear", name=layer.name, kind=layer.kind)
    if layer.name != DOUBLED:
        return None

    def compute(y: Any, x: Any) -> None:
        layer.compute(y, x)
        layer.compute(y, x)

    return compute


@hookimpl
def linear_observer(layer: LinearLayer) -> Compute | None:
    def observe(y: Any, x: Any) -> None:
        record("linear_observer", name=layer.name, y=list(y.shape), x=list(x.shape))

    return observe if layer.name == DOUBLED else None


def _event(kind: str) -> Callable[[Adapter], None]:
    def tell(adapter: Adapter) -> None:
        record(f"adapter_{kind}", **asdict(adapter))

    return hookimpl(tell)


adapter_discovered = _event("discovered")
adapter_rejected = _event("rejected")
adapter_ready = _event("ready")
adapter_retired = _event("retired")
adapter_activated = _event("activated")
adapter_evicted = _event("evicted")


@hookimpl
def register_metrics(registry: CollectorRegistry) -> None:
    Counter("recorder_starts", "Starts of the recorder", registry=registry).inc()


@hookimpl
def admin_routes() -> list[web.RouteDef]:
    async def hello(request: web.Request) -> web.Response:
        return web.json_response({"from": "recorder"})

    return [web.get("/x/recorder", hello)]
