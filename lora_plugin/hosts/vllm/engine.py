"""The engine core's side: it asks workers to stage, keeps the pool informed, and answers the API servers.

Everything here runs on the engine's thread between steps, so it only starts work or asks.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

from lora_plugin.errors import AdapterRejected, LoraPluginError, Reason
from lora_plugin.extensions.lifecycle import DeviceEvents
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hosts.vllm import rpc
from lora_plugin.hosts.vllm.requests import to_spec
from lora_plugin.pool.entry import Host
from lora_plugin.pool.orders import Orders
from lora_plugin.pool.pool import AdapterPool
from lora_plugin.pool.usage import Usage
from lora_plugin.readiness.staging import HOLD_SECONDS, StageSpec
from lora_plugin.worker.stager import Job

logger = logging.getLogger("lora_plugin")

_POLL_SECONDS = 0.005
_MAX_FAILURES = 1000

_executors: weakref.WeakSet[Any] = weakref.WeakSet()


class EngineAdapters:
    """Between one engine's pool and its workers.

    Args:
        executor: the host's executor; every rank executes the same calls in the same order as its steps.
        pool: the engine's pool.
        hooks: this process's.
        requests: the scheduler's unfinished requests.

    Attributes:
        usage: what its adapters were used for.
    """

    def __init__(
        self,
        executor: Any,
        pool: AdapterPool,
        hooks: HookManager,
        requests: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._requests = requests
        listened = hooks.has("adapter_activated") or hooks.has("adapter_evicted")
        self._events = DeviceEvents(hooks, pool.get) if listened else None
        self._jobs: dict[int, Job] = {}
        self._staging: set[int] = set()
        self._failures: dict[int, Reason] = {}
        self.usage = Usage()
        self._pins: set[int] = set()
        self._emptied = False
        self._parked = False
        self._polled_at = 0.0
        self._commands: dict[str, Callable[[dict[str, Any]], Any]] = {
            "layout": lambda _: self._executor.collective_rpc(rpc.layout)[0],
            "stage": self._stage,
            "room": lambda _: self._pool.host_free,
            "lease": self._lease,
            "drain": lambda p: self._pool.drain(p["name"], p["seconds"]),
            "release": lambda p: self._release(int(p["id"])),
            "evict": lambda p: self._pool.evict(int(p["id"])),
            "pin": lambda p: self._pool.pin(int(p["id"])),
            "unpin": lambda p: self._pool.unpin(int(p["id"])),
            "snapshot": lambda _: self._pool.snapshot(),
            "versions": lambda p: self._pool.versions(p["name"]),
            "measure": lambda _: self._measure(),
            "requests": lambda _: self._adapter_requests(),
            "explain": lambda p: self._executor.collective_rpc(rpc.explain, args=(int(p["id"]),))[0],
        }

    def want(self, request: LoRARequest) -> None:
        """A request for a version arrived: have it staged unless it is."""
        self._want(to_spec(request), served=False)

    def park(self, adapter_id: int) -> Reason | None:
        """A request waits for a version that cannot join this step; the reason when it never will."""
        self._parked = True
        return self._failures.get(adapter_id)

    def refused(self, adapter_id: int) -> Reason | None:
        """Why a version cannot be staged, or None."""
        return self._failures.get(adapter_id)

    def advance(self) -> None:
        """Ask how staging goes, if a request waits for it and it was not asked just now."""
        now = time.monotonic()
        if not (self._parked or self._pins) or now - self._polled_at < _POLL_SECONDS:
            return
        self._parked, self._polled_at = False, now
        for entry in self._pool.restage():
            self._jobs[entry.adapter_id] = Job(entry.adapter_id, entry.name, entry.path, entry.digest)
        if self._jobs or self._staging:
            self._exchange()

    def take_orders(self) -> Orders:
        """What the workers are to be told with the next step or call; plugins hear of it.

        Nothing while the workers' memory is away.
        """
        if self._executor.is_sleeping:
            return ()
        orders = self._pool.take_orders()
        if self._events is not None:
            self._events.follow(orders)
        return orders

    def slept(self, level: int) -> None:
        """The engine was put to sleep; from level 2 on, what is on the device is lost."""
        self._emptied |= level >= 2

    def recover(self) -> frozenset[int]:
        """After sleep, or an RPC that may have replaced weights: pool and workers agree again.

        Returns:
            The versions that were made of weights that are gone: for `renew`, once no request runs with one.
        """
        emptied = self._emptied and not self._executor.is_sleeping
        replies = self._executor.collective_rpc(rpc.recover, args=(emptied,))
        if emptied:
            self._emptied = False
            self._pool.reset_device()
        return frozenset(adapter_id for reply in replies for adapter_id in reply)

    def renew(self, outdated: Iterable[int]) -> None:
        """Give up these versions' copies: made anew on demand, and at once if they are pinned."""
        for adapter_id in outdated:
            entry = self._pool.get(adapter_id)
            pinned = entry is not None and entry.pinned
            if self._pool.discard(adapter_id) and entry is not None and pinned:
                self._pins.add(adapter_id)
                self._want(StageSpec(adapter_id, entry.name, entry.digest, entry.path, entry.nbytes))

    def call(self, command: str, payload: dict[str, Any], *, idle: bool) -> dict[str, Any]:
        """Execute a command.

        Args:
            command: one of the table's.
            payload: its arguments, plain data.
            idle: whether no step will follow by itself that could carry orders to the workers.

        Returns:
            `{"result": ...}`, or `{"error": reason, "status": int}` for a refusal.
        """
        try:
            result = self._commands[command](payload)
            if idle and self._pool.has_orders:
                self._exchange()
        except LoraPluginError as error:
            return {"error": error.reason.to_dict(), "status": error.status}
        return {"result": result}

    def _measure(self) -> dict[str, Any]:
        """A snapshot with what only metrics need; the first rank stands for all."""
        worker = self._executor.collective_rpc(rpc.measure)[0]
        return {**self._pool.snapshot(), "usage": self.usage.to_dict(), "worker": worker}

    def _want(self, spec: StageSpec, *, served: bool = True) -> None:
        self._failures.pop(spec.id, None)
        try:
            wanted = self._pool.want(spec.id, spec.name, spec.digest, spec.path, spec.nbytes, served=served)
        except AdapterRejected as error:
            self._fail(spec.id, error.reason)
            return
        if wanted:
            self._jobs[spec.id] = Job(spec.id, spec.name, spec.path, spec.digest)

    def _stage(self, payload: dict[str, Any]) -> dict[str, Any]:
        specs = [StageSpec(**fields) for fields in payload["adapters"]]
        with self._pool.moment():
            for spec in specs:
                self._want(spec)
        if self._jobs or any(spec.id in self._staging for spec in specs):
            self._exchange()
        return {str(spec.id): self._status(spec) for spec in specs}

    def _release(self, adapter_id: int) -> None:
        entry = self._pool.get(adapter_id)
        if entry is not None and not entry.retired:
            # Another API server may have given it to a request that is not here yet.
            self._pool.hold(adapter_id, HOLD_SECONDS)
        self._pool.retire(adapter_id)

    def _lease(self, payload: dict[str, Any]) -> list[int]:
        client, seconds = payload["client"], payload["seconds"]
        return [i for i in payload["ids"] if self._pool.lease(client, i, seconds)]

    def _status(self, spec: StageSpec) -> dict[str, Any]:
        # A refusal is told once: asked again, the version is tried again.
        reason = self._failures.get(spec.id)
        if reason is not None:
            return {"state": "failed", "reason": reason.to_dict()}
        if self._pool.hold(spec.id, HOLD_SECONDS) and spec.soon:
            self._pool.place_ahead(spec.id)
        entry = self._pool.get(spec.id)
        return {"state": "waiting" if entry is None else str(entry.host)}

    def _exchange(self) -> None:
        """One call to every rank: orders so far, new jobs, and how the jobs under way stand."""
        if self._executor.is_sleeping:
            return
        jobs, self._jobs = list(self._jobs.values()), {}
        # What was retired meanwhile is forgotten by the workers: they would be asked for ever.
        self._staging = {i for i in self._staging if self._is_staging(i)} | {job.adapter_id for job in jobs}
        asked = sorted(self._staging)
        replies = self._executor.collective_rpc(rpc.exchange, args=(self.take_orders(), jobs, asked))
        for adapter_id in asked:
            self._settle(adapter_id, [reply.get(adapter_id, {"state": "staging"}) for reply in replies])

    def _settle(self, adapter_id: int, outcomes: list[dict[str, Any]]) -> None:
        failed = next((o for o in outcomes if o["state"] == "failed"), None)
        if failed is not None:
            self._pool.failed(adapter_id, Reason.from_dict(failed["reason"]))
            self._fail(adapter_id, Reason.from_dict(failed["reason"]))
        elif all(o["state"] == "ready" for o in outcomes):
            self._staging.discard(adapter_id)
            try:
                self._pool.staged(
                    adapter_id,
                    outcomes[0]["rows"],
                    sum(o["nbytes"] for o in outcomes),
                    max(o["seconds"] for o in outcomes),
                )
            except AdapterRejected as error:
                self._fail(adapter_id, error.reason)
            else:
                self._pin_again(adapter_id)

    def _pin_again(self, adapter_id: int) -> None:
        if adapter_id not in self._pins:
            return
        self._pins.discard(adapter_id)
        try:
            self._pool.pin(adapter_id)
        except LoraPluginError as error:
            logger.warning("a pin was lost with the base model's weights: %s", error.reason)

    def _adapter_requests(self) -> dict[str, Any]:
        """Names of adapters whose requests run, and of those whose wait or which are being loaded."""
        running: set[str] = set()
        waiting = {entry.name for entry in self._pool.loading()}
        for request in self._requests():
            if request.lora_request is not None:
                runs = request.status == RequestStatus.RUNNING
                (running if runs else waiting).add(request.lora_request.lora_name)
        return {"running": sorted(running), "waiting": sorted(waiting), "slabs": self._pool.slabs}

    def _is_staging(self, adapter_id: int) -> bool:
        entry = self._pool.get(adapter_id)
        return entry is not None and entry.host is Host.STAGING

    def _fail(self, adapter_id: int, reason: Reason) -> None:
        self._staging.discard(adapter_id)
        self._pins.discard(adapter_id)
        # Only the latest are of use to anyone; a directory of bad adapters must not grow this for ever.
        while len(self._failures) >= _MAX_FAILURES:
            self._failures.pop(next(iter(self._failures)))
        self._failures[adapter_id] = reason


def remember_executor(original: Callable[..., None]) -> Callable[..., None]:
    """Around `Executor.__init__`: the scheduler, made later from the same config, finds its executor."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _executors.add(self)

    return init


def executor_of(vllm_config: Any) -> Any:
    """The executor that was made from this config object."""
    return next(executor for executor in _executors if executor.vllm_config is vllm_config)
