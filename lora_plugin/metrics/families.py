"""What a snapshot says, as metric families; sums over the engines."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lora_plugin.admin.models import AdapterView, EngineView, PoolView
from lora_plugin.directory.entry import AdapterState
from lora_plugin.distribution import Distribution
from lora_plugin.metrics.snapshot import Snapshot
from lora_plugin.pool.usage import MAX_NAMES, OTHER
from lora_plugin.worker.load_times import Stage

PREFIX = "lora_plugin"


class BoundedLabels:
    """The first `limit` names seen; every later one becomes "other"."""

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._limit = limit
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def label(self, name: str) -> str:
        with self._lock:
            if name == OTHER:
                return OTHER
            if name not in self._names and len(self._names) >= self._limit:
                return OTHER
            self._names.add(name)
            return name


class SnapshotCollector(Collector):
    """The metrics that follow from the latest snapshot."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        # Each engine has its own first names; together they are bounded too.
        self._labels = BoundedLabels()

    def collect(self) -> Iterator[Metric]:
        snapshot = self.snapshot
        up = GaugeMetricFamily(f"{PREFIX}_up", "1 when the engines answered for this scrape")
        up.add_metric([], float(snapshot is not None))
        yield up
        if snapshot is not None:
            yield from _adapter_metrics(snapshot.adapters)
            yield from _residency_metrics(snapshot.pool.engines)
            yield from _wait_metrics(snapshot.pool)
            yield from _pool_counters(snapshot.pool)
            yield from self._usage(snapshot)
            yield from _worker_metrics(snapshot)

    def _usage(self, snapshot: Snapshot) -> Iterator[Metric]:
        sums: tuple[Tally[str], ...] = (Tally(), Tally(), Tally())
        for engine in snapshot.usage:
            for name, counts in engine["by_name"].items():
                label = self._labels.label(name)
                for each, count in zip(sums, counts, strict=True):
                    each[label] += count
        requests, prompt, generated = sums
        yield _counters("requests", "Requests that ended, by adapter", "adapter", requests)
        yield _counters("prompt_tokens", "Prompt tokens of requests that ended", "adapter", prompt)
        yield _counters("generated_tokens", "Tokens that they generated", "adapter", generated)
        steps = Distribution.total(engine["steps"] for engine in snapshot.usage)
        family = HistogramMetricFamily(f"{PREFIX}_step_adapters", "Adapters in a step")
        _add(family, [], steps)
        yield family


def _adapter_metrics(adapters: Iterable[AdapterView]) -> Iterator[Metric]:
    states = Tally(adapter.state.value for adapter in adapters)
    codes = Tally(
        a.reason.code.value for a in adapters if a.state is AdapterState.REJECTED and a.reason is not None
    )
    yield _gauge("adapters", "Adapters by state", "state", states)
    yield _gauge("adapters_rejected", "Rejected adapters by code", "code", codes)


def _residency_metrics(engines: Sequence[EngineView]) -> Iterator[Metric]:
    """Of versions and compositions, too: what the pools hold, not what the catalog has."""
    rows = {
        "host": sum(engine.host_rows for engine in engines),
        "device": sum(engine.rows_total - engine.rows_free for engine in engines),
    }
    nbytes = {
        "host": sum(engine.host_bytes for engine in engines),
        "device": sum(engine.device_bytes for engine in engines),
    }
    capacity = {"device": sum(engine.rows_total for engine in engines)}
    budget = {"host": sum(engine.host_budget_bytes for engine in engines)}
    yield _gauge("resident_rows", "Rank rows held by adapters, by tier", "tier", rows)
    yield _gauge("resident_bytes", "Bytes held by adapters, by tier", "tier", nbytes)
    yield _gauge("capacity_rows", "Rank rows there are, by tier", "tier", capacity)
    yield _gauge("capacity_bytes", "Bytes that adapters may hold, by tier", "tier", budget)


def _wait_metrics(pool: PoolView) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        f"{PREFIX}_waiting_requests",
        "Requests that wait for room on the device",
        value=sum(engine.waiting_requests for engine in pool.engines),
    )
    yield GaugeMetricFamily(
        f"{PREFIX}_longest_wait_seconds",
        "How long the oldest of them has waited",
        value=max((engine.longest_wait_seconds for engine in pool.engines), default=0.0),
    )


def _pool_counters(pool: PoolView) -> Iterator[Metric]:
    counters = [engine.counters for engine in pool.engines]
    evictions: Tally[str] = Tally()
    for each in counters:
        evictions.update(each.evictions)
    yield _counter("loads", "Copies from host memory to the device", sum(c.loads for c in counters))
    yield _counter(
        "hits", "Requests whose adapter was on the device when they arrived", sum(c.hits for c in counters)
    )
    yield _counter(
        "misses",
        "Requests whose adapter was not on the device when they arrived, or only just, for their sake",
        sum(c.misses for c in counters),
    )
    yield _counters("evictions", "Adapters evicted, by reason", "reason", evictions)


def _worker_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    family = HistogramMetricFamily(
        f"{PREFIX}_load_seconds", "Seconds of a load in a worker, by stage", labels=["stage"]
    )
    for stage in Stage:
        _add(family, [stage], Distribution.total(worker["seconds"][stage] for worker in snapshot.workers))
    yield family
    plans: Tally[str] = Tally()
    for worker in snapshot.workers:
        plans.update(worker["plans"])
    yield _counters("kernel_plans", "Steps that were planned anew, by kernels", "kernels", plans)


def _add(family: HistogramMetricFamily, labels: list[str], values: Distribution) -> None:
    bounds = [*map(str, map(float, values.bounds)), "+Inf"]
    cumulated = list(accumulate(values.counts))
    family.add_metric(labels, list(zip(bounds, cumulated, strict=True)), values.sum)


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)
