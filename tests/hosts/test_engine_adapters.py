"""The engine's line between pool and workers, with real stagers on two ranks and a loader that waits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hosts.vllm import rpc
from lora_plugin.hosts.vllm.core import list_loras
from lora_plugin.hosts.vllm.engine import EngineAdapters
from lora_plugin.layout import ModelLayout
from lora_plugin.pool.orders import Drop, Forget, Load, Orders
from lora_plugin.pool.pool import AdapterPool
from lora_plugin.worker.load_times import LoadTimes
from lora_plugin.worker.stager import Job, Stager

LAYOUT = ModelLayout((), "float32", 16, {})


class Rank:
    """A worker with a stager and a record of what it was ordered."""

    def __init__(self, loader: Callable[..., PackedAdapter]) -> None:
        self.times = LoadTimes(torch.device("cpu"))
        self.stager = Stager(LAYOUT, 1 << 20, None, loader=loader, times=self.times)
        self.orders: list[Load | Drop | Forget] = []
        self.emptied = 0
        self.outdated: set[int] = set()

    def execute(self, orders: Orders) -> None:
        self.orders += orders
        for order in orders:
            if isinstance(order, Forget):
                self.stager.forget(order.adapter_id)
            elif isinstance(order, Load):
                self.stager.packed(order.adapter_id)

    def stage(self, jobs: list[Job], ask: list[int]) -> dict[int, dict[str, Any]]:
        for job in jobs:
            self.stager.stage(job)
        outcomes = {adapter_id: self.stager.outcome(adapter_id) for adapter_id in ask}
        return {adapter_id: outcome.to_dict() for adapter_id, outcome in outcomes.items() if outcome}

    def recover(self, emptied: bool) -> list[int]:
        self.emptied += emptied
        return sorted(self.outdated)

    def measure(self) -> dict[str, Any]:
        return {"seconds": self.times.to_dict(), "plans": {}}

    @property
    def model_runner(self) -> Any:
        return type("Runner", (), {"lora_manager": self})


class Engine:
    """Two ranks whose loads finish when `gate` is open, and fail for a path that says so."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.loads = 0
        self.is_sleeping = False
        self.ranks = [Rank(self.load), Rank(self.load)]
        self.pool = AdapterPool(2, 16, 1000)
        self.adapters = EngineAdapters(self, self.pool, HookManager())

    def load(self, root: Any, name: str, *args: Any, **kwargs: Any) -> PackedAdapter:
        self.gate.wait(10)
        self.loads += 1
        if name == "deadly":
            raise SystemExit
        if name == "bad":
            raise AdapterRejected(Code.NOT_FINITE, "a tensor holds NaN")
        return PackedAdapter(8, 100, (), torch.zeros(0))

    def collective_rpc(self, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        assert function in (rpc.exchange, rpc.layout, rpc.measure, rpc.recover)
        return [function(rank, *args) for rank in self.ranks]

    def stage(self, adapter_id: int, name: str = "good", **more: Any) -> dict[str, Any]:
        spec = {"id": adapter_id, "name": name, "digest": "d", "path": f"/w/{name}", "nbytes": 200, **more}
        reply = self.adapters.call("stage", {"adapters": [spec]}, idle=True)
        status: dict[str, Any] = reply["result"][str(adapter_id)]
        return status

    def until(self, adapter_id: int, state: str, name: str = "good") -> dict[str, Any]:
        deadline = time.monotonic() + 10
        while (status := self.stage(adapter_id, name))["state"] != state:
            assert time.monotonic() < deadline, status
            time.sleep(0.005)
        return status


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_asking_again_starts_nothing_again(engine: Engine) -> None:
    engine.gate.clear()
    assert [engine.stage(7)["state"] for _ in range(5)] == ["staging"] * 5
    engine.gate.set()
    engine.until(7, "ready")
    assert engine.loads == len(engine.ranks)
    assert engine.pool.snapshot()["host_bytes"] == 200


def test_what_a_request_follows_for_is_on_the_device_before_it(engine: Engine) -> None:
    engine.until(7, "ready")
    engine.until(8, "ready")
    assert engine.pool.take_orders() == ()
    for _ in range(2):
        engine.stage(7, soon=True)
        assert [rank.orders for rank in engine.ranks] == [[Load(7, 0)]] * 2


def test_the_host_lists_what_can_be_used(engine: Engine) -> None:
    core = SimpleNamespace(scheduler=SimpleNamespace(adapters=engine.adapters, pool=engine.pool))
    listed = list_loras(lambda core: {1})
    engine.until(7, "ready")
    engine.gate.clear()
    engine.stage(8)
    assert listed(core) == {7}
    engine.gate.set()
    assert listed(SimpleNamespace(scheduler=SimpleNamespace())) == {1}


def test_every_rank_must_have_it(engine: Engine) -> None:
    engine.ranks[1].stager._loader = lambda *args, **kwargs: engine.load(None, "bad")
    assert engine.until(7, "failed")["reason"]["code"] == "not-finite"
    assert engine.pool.snapshot()["host_bytes"] == 0


def test_a_refusal_is_told_and_may_be_tried_again(engine: Engine) -> None:
    engine.until(7, "failed", "bad")
    engine.until(7, "failed", "bad")
    assert engine.loads == 2 * len(engine.ranks)


def test_retired_while_it_is_staged_it_can_come_back(engine: Engine) -> None:
    """The folder is deleted and put back while the first load runs."""
    engine.gate.clear()
    engine.stage(7)
    assert engine.adapters.call("release", {"id": "7"}, idle=True) == {"result": None}
    engine.gate.set()
    time.sleep(0.05)
    engine.until(7, "ready")


def test_a_request_on_its_way_finds_a_version_that_another_api_server_let_go(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(engine.pool._versions, "clock", lambda: clock[0])
    engine.until(7, "ready")
    engine.pool.acquire("r1", 7)
    for _ in range(2):
        engine.adapters.call("release", {"id": 7}, idle=True)
    engine.pool.release("r1")
    engine.pool.acquire("r2", 7)
    assert engine.pool.try_admit(7)
    engine.pool.release("r2")
    clock[0] += 3
    engine.adapters.call("release", {"id": 7}, idle=True)
    assert engine.pool.get(7) is None
    assert engine.loads == len(engine.ranks)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_stager_costs_the_adapter_at_hand_only(engine: Engine) -> None:
    """The next one waits in its queue, asked for before the thread died."""
    engine.gate.clear()
    engine.stage(7, "deadly")
    engine.stage(8)
    engine.gate.set()
    assert engine.until(7, "failed", "deadly")["reason"]["code"] == "internal"
    engine.until(8, "ready")
    assert engine.pool.snapshot()["host_bytes"] == 200


def test_too_large_for_the_host_cache_is_a_refusal(engine: Engine) -> None:
    spec = {"id": 9, "name": "big", "digest": "d", "path": "/w/big", "nbytes": 10**9}
    reply = engine.adapters.call("stage", {"adapters": [spec]}, idle=True)
    assert reply["result"]["9"]["reason"]["code"] == "host-cache-full"


def test_refusals_of_the_pool_are_replies(engine: Engine) -> None:
    reply = engine.adapters.call("pin", {"id": 5}, idle=True)
    assert reply["error"]["code"] == "not-found"
    assert reply["status"] == 404


def test_a_parked_request_has_its_lost_version_staged_again(engine: Engine) -> None:
    engine.until(7, "ready")
    engine.pool.acquire("r", 7)
    engine.pool.release("r")
    engine.adapters.call("evict", {"id": 7}, idle=True)
    engine.pool.acquire("r2", 7)
    assert not engine.pool.try_admit(7)
    assert engine.adapters.park(7) is None
    deadline = time.monotonic() + 10
    while not engine.pool.try_admit(7):
        assert time.monotonic() < deadline
        engine.adapters.park(7)
        engine.adapters.advance()
        time.sleep(0.006)


def test_metrics_come_with_a_snapshot(engine: Engine) -> None:
    engine.until(7, "ready")
    engine.adapters.usage.finished("good", 3, 4)
    engine.adapters.usage.step(1)
    result = json.loads(json.dumps(engine.adapters.call("measure", {}, idle=True)))["result"]
    assert result["slabs"] == 2
    assert result["usage"]["by_name"] == {"good": [1, 3, 4]}
    assert sum(result["usage"]["steps"]["counts"]) == 1
    seconds = result["worker"]["seconds"]
    assert [sum(seconds[stage]["counts"]) for stage in ("queue", "pack", "device")] == [1, 1, 0]


def test_nothing_goes_to_workers_whose_memory_is_away(engine: Engine) -> None:
    engine.until(7, "ready")
    engine.adapters.call("pin", {"id": 7}, idle=False)
    engine.is_sleeping = True
    before = [list(rank.orders) for rank in engine.ranks]
    assert engine.adapters.take_orders() == ()
    assert engine.stage(8)["state"] == "staging"
    assert [rank.orders for rank in engine.ranks] == before
    assert engine.loads == len(engine.ranks)
    engine.is_sleeping = False
    engine.until(8, "ready")
    assert all(Load(7, 0) in rank.orders for rank in engine.ranks)


def test_after_level_two_what_is_pinned_is_loaded_again(engine: Engine) -> None:
    engine.until(7, "ready")
    engine.adapters.call("pin", {"id": 7}, idle=True)
    for level, emptied in ((1, 0), (2, 1), (1, 1)):
        engine.adapters.slept(level)
        # Weights first, as after level 2: nothing is emptied until all memory is back.
        engine.is_sleeping = True
        assert engine.adapters.recover() == frozenset()
        engine.is_sleeping = False
        assert engine.adapters.recover() == frozenset()
        assert [rank.emptied for rank in engine.ranks] == [emptied] * 2
        assert engine.adapters.take_orders() == ((Load(7, 0),) if level == 2 else ())


def test_what_was_made_of_other_weights_is_made_anew(engine: Engine) -> None:
    for adapter_id in (7, 8, 9):
        engine.until(adapter_id, "ready")
    engine.adapters.call("pin", {"id": 7}, idle=True)
    engine.pool.acquire("r", 8)
    for rank in engine.ranks:
        rank.outdated = {7, 8}
    outdated = engine.adapters.recover()
    assert outdated == {7, 8}
    engine.adapters.renew(outdated)
    assert engine.pool.snapshot()["host_bytes"] == 200
    deadline = time.monotonic() + 10
    while not (engine.pool.try_admit(8) and engine.pool.try_admit(7)):
        assert time.monotonic() < deadline
        engine.adapters.park(8)
        engine.adapters.advance()
        time.sleep(0.006)
    assert engine.loads == (3 + 2) * len(engine.ranks)
    assert engine.pool.get(7).pinned
