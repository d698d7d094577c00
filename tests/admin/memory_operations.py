"""The admin endpoint's operations on a dictionary."""

from __future__ import annotations

from typing import Any

from lora_plugin.admin.explanation import ExplanationView, FindingView, Level, Question
from lora_plugin.admin.models import (
    AdapterView,
    AliasView,
    CompositionView,
    EngineView,
    ExtentView,
    HubSource,
    PoolCounters,
    PoolView,
    ReasonView,
    Residency,
    RoutingFileView,
    RoutingView,
    SettingView,
    TargetView,
)
from lora_plugin.directory.entry import AdapterState
from lora_plugin.errors import AdapterBusy, AdapterNotFound, Code, Forbidden, Reason
from lora_plugin.metrics import Snapshot
from lora_plugin.readiness.loads import LoadOutcome

DIGEST = "5f" * 32
REJECTION = Reason(
    Code.RANK_TOO_LARGE,
    "The rank is above the server's maximum",
    expected="at most 64",
    found="128",
    hint="start the server with --max-lora-rank 128",
)


def listed(name: str, *, engines: int = 2, requests: int = 0) -> AdapterView:
    """A served adapter of rank 16 that every engine holds in host memory and one on the device."""
    return AdapterView(
        name=name,
        state=AdapterState.LISTED,
        version=DIGEST,
        id=str((1 << 62) - 1),
        rank=16,
        targets=("q_proj", "v_proj"),
        nbytes=4096,
        packed_bytes=8192,
        base_model="tiny",
        residency=Residency(disk=True, host=engines, device=1, engines=engines),
        requests=requests,
        listed_at=1_700_000_000.0,
        last_used_seconds_ago=3.5,
    )


def rejected(name: str, reason: Reason = REJECTION) -> AdapterView:
    residency = Residency(disk=True, host=0, device=0, engines=2)
    return AdapterView(
        name=name, state=AdapterState.REJECTED, reason=ReasonView.of(reason), residency=residency
    )


def engine(*extents: ExtentView, evictions: dict[str, int] | None = None) -> EngineView:
    return EngineView(
        slabs=4,
        slab_rows=64,
        rows_total=256,
        rows_free=256 - sum(extent.rows for extent in extents),
        host_rows=24,
        host_bytes=8192,
        device_bytes=4096,
        host_budget_bytes=1 << 20,
        waiting_requests=3,
        longest_wait_seconds=1.5,
        extents=extents,
        counters=PoolCounters(loads=5, hits=7, misses=2, evictions=evictions or {}),
    )


class MemoryOperations:
    """Obeys the protocol: busy adapters are not evicted, unloaded ones stay visible."""

    def __init__(self, *views: AdapterView) -> None:
        self.views = {view.name: view for view in views}
        self.is_ready = True
        self.drained: float | None = None
        self.failure: Exception | None = None
        self.usage: list[dict[str, Any]] = []
        self.workers: list[dict[str, Any]] = []
        extent = ExtentView(
            slab=0, adapter="sql", version=DIGEST, first_row=8, rows=16, pinned=False, requests=1
        )
        self.engines = (engine(extent, evictions={"room": 2}), engine(evictions={"room": 1, "operator": 1}))

    async def adapters(self) -> list[AdapterView]:
        self._fail()
        return sorted(self.views.values(), key=lambda view: view.name)

    async def adapter(self, name: str) -> AdapterView:
        self._fail()
        if name not in self.views:
            raise AdapterNotFound(Code.NOT_FOUND, f"No adapter is named {name!r}", hint="GET /v1/adapters")
        return self.views[name]

    async def load(self, name: str, source: HubSource | None, wait: float) -> LoadOutcome:
        self._fail()
        if name not in self.views and source is not None:
            raise Forbidden(Code.FORBIDDEN, "no source is allowed on this server")
        self._set(await self.adapter(name), state=AdapterState.LISTED, reason=None)
        view = self.views[name]
        if view.residency.host == view.residency.engines:
            return LoadOutcome.READY
        if not wait:
            return LoadOutcome.UNDER_WAY
        self._set(view, residency=view.residency.model_copy(update={"host": view.residency.engines}))
        return LoadOutcome.DONE

    async def reload(self, name: str) -> None:
        self._set(await self.adapter(name), state=AdapterState.LISTED, reason=None)

    async def evict(self, name: str) -> None:
        view = await self.adapter(name)
        if view.pinned:
            raise AdapterBusy(Code.PINNED, f"{name!r} is pinned", hint="unpin it first")
        if view.requests:
            raise AdapterBusy(Code.IN_USE, f"{name!r} is in use", found=f"{view.requests} requests")
        gone = view.residency.model_copy(update={"host": 0, "device": 0})
        self._set(view, residency=gone)

    async def pin(self, name: str) -> None:
        self._set(await self.adapter(name), pinned=True)

    async def unpin(self, name: str) -> None:
        self._set(await self.adapter(name), pinned=False)

    async def unload(self, name: str, drain: float | None = None) -> None:
        self.drained = drain
        self._set(await self.adapter(name), state=AdapterState.UNLOADED)

    async def pool(self) -> PoolView:
        self._fail()
        return PoolView(engines=self.engines)

    async def explain(self, name: str) -> ExplanationView:
        view = await self.adapter(name)
        wrong = view.state is AdapterState.REJECTED
        level, text = (Level.PROBLEM, "it is rejected") if wrong else (Level.OK, "it changes 3 of 4 layers")
        finding = FindingView(question=Question.NO_EFFECT, level=level, text=text)
        return ExplanationView(name=name, adapter=view, findings=(finding,))

    async def routing(self) -> RoutingView:
        self._fail()
        target = TargetView(adapter="sql", weight=1.0)
        return RoutingView(
            aliases=(AliasView(name="prod", targets=(target,), fallback=False),),
            compositions=(CompositionView(name="mix", parts=(target, target)),),
            files=(RoutingFileView(name="aliases.yaml", entries=1),),
        )

    async def measure(self) -> Snapshot:
        return Snapshot(await self.adapters(), await self.pool(), self.usage, self.workers)

    async def config(self) -> list[SettingView]:
        self._fail()
        token = SettingView(
            variable="LORA_PLUGIN_ADMIN_TOKEN",
            value="****",
            source="LORA_PLUGIN_ADMIN_TOKEN",
            description="token",
        )
        return [token]

    async def ready(self) -> bool:
        self._fail()
        return self.is_ready

    def _set(self, view: AdapterView, **fields: object) -> None:
        self.views[view.name] = view.model_copy(update=fields)

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure
