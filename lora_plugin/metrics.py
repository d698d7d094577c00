"""Prometheus metrics in a registry of our own.

What the catalog and the pool know comes from one snapshot per scrape; the rest is counted as it happens.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lora_plugin.admin.models import AdapterView, PoolView
from lora_plugin.entry import AdapterState
from lora_plugin.errors import Code

PREFIX = "lora_plugin"
MAX_ADAPTER_LABELS = 200
OTHER = "other"

_STAGING_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one scrape shows of the catalog and the engines."""

    adapters: list[AdapterView]
    pool: PoolView


class BoundedLabels:
    """The first `limit` names seen; every later one becomes "other"."""

    def __init__(self, limit: int = MAX_ADAPTER_LABELS) -> None:
        self._limit = limit
        self._names: set[str] = set()
        self._lock = threading.Lock()

    def label(self, name: str) -> str:
        with self._lock:
            if name not in self._names and len(self._names) >= self._limit:
                return OTHER
            self._names.add(name)
            return name


class SnapshotCollector(Collector):
    """The metrics that follow from the latest snapshot; sums over the engines."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        snapshot = self.snapshot
        up = GaugeMetricFamily(f"{PREFIX}_up", "1 when the engines answered for this scrape")
        up.add_metric([], float(snapshot is not None))
        yield up
        if snapshot is not None:
            yield from _adapter_metrics(snapshot.adapters)
            yield from _residency_metrics(snapshot)
            yield from _wait_metrics(snapshot.pool)
            yield from _pool_counters(snapshot.pool)


class Metrics:
    """The registry and what others increment; every method may be called from any thread.

    Attributes:
        registry: separate from prometheus_client's default one.
        staging_seconds: observe the seconds from the first request for a version until it is staged.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.staging_seconds = Histogram(
            f"{PREFIX}_staging_seconds",
            "Seconds until an adapter was staged in host memory",
            buckets=_STAGING_BUCKETS,
            registry=self.registry,
        )
        self._requests = Counter(
            f"{PREFIX}_requests", "Requests by adapter", ["adapter"], registry=self.registry
        )
        self._rejections = Counter(
            f"{PREFIX}_rejections", "Refusals by code", ["code"], registry=self.registry
        )
        self._routing_files = Gauge(
            f"{PREFIX}_routing_file_valid",
            "1 when the present content of a routing file is what is gone by",
            ["file"],
            registry=self.registry,
        )
        self._labels = BoundedLabels()
        self._snapshots = SnapshotCollector()
        self.registry.register(self._snapshots)

    def count_request(self, adapter: str) -> None:
        """One request served by `adapter`: a resolved name, never the client's text."""
        self._requests.labels(self._labels.label(adapter)).inc()

    def count_rejection(self, code: Code) -> None:
        """One folder or request refused."""
        self._rejections.labels(code.value).inc()

    def note_routing_file(self, name: str, *, valid: bool) -> None:
        """How a routing file stands."""
        self._routing_files.labels(name).set(valid)

    def update(self, snapshot: Snapshot | None) -> None:
        """Sets what the next `render` shows; None: the engines did not answer."""
        self._snapshots.snapshot = snapshot

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type, in the format that an Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


def _adapter_metrics(adapters: Iterable[AdapterView]) -> Iterator[Metric]:
    states = Tally(adapter.state.value for adapter in adapters)
    codes = Tally(
        a.reason.code.value for a in adapters if a.state is AdapterState.REJECTED and a.reason is not None
    )
    yield _gauge("adapters", "Adapters by state", "state", states)
    yield _gauge("adapters_rejected", "Rejected adapters by code", "code", codes)


def _residency_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    engines = snapshot.pool.engines
    # Rows in host memory are ranks: only the device rounds them up.
    rows = {
        "host": sum((a.rank or 0) * a.residency.host for a in snapshot.adapters),
        "device": sum(engine.rows_total - engine.rows_free for engine in engines),
    }
    nbytes = {
        "host": sum(engine.host_bytes for engine in engines),
        "device": sum(a.packed_bytes * a.residency.device for a in snapshot.adapters),
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
    yield _counter("hits", "Admissions that found the adapter resident", sum(c.hits for c in counters))
    yield _counter("misses", "Admissions that did not find it resident", sum(c.misses for c in counters))
    family = CounterMetricFamily(f"{PREFIX}_evictions", "Adapters evicted, by reason", labels=["reason"])
    for reason, count in sorted(evictions.items()):
        family.add_metric([reason], count)
    yield family


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)
