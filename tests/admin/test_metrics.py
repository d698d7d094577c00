from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from aiohttp.test_utils import TestClient
from hypothesis import given
from hypothesis import strategies as st
from memory_operations import MemoryOperations
from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from lora_plugin.distribution import SECONDS, Distribution
from lora_plugin.errors import Code, Unavailable
from lora_plugin.metrics import Metrics, render
from lora_plugin.metrics.families import BoundedLabels
from lora_plugin.pool.usage import MAX_NAMES, Usage
from lora_plugin.worker.load_times import LoadTimes, Stage

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _samples(text: str) -> Samples:
    families = parse_text(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def _rendered(metrics: Metrics) -> Samples:
    return _samples(render(metrics.registry)[0].decode())


async def _scraped(client: TestClient) -> Samples:
    response = await client.get("/metrics")
    assert response.status == 200
    return _samples(await response.text())


async def test_the_snapshot_as_metrics(client: TestClient) -> None:
    samples = await _scraped(client)
    expected = {
        ("lora_plugin_up", ()): 1,
        ("lora_plugin_adapters", (("state", "listed"),)): 2,
        ("lora_plugin_adapters", (("state", "rejected"),)): 1,
        ("lora_plugin_adapters_rejected", (("code", "rank-too-large"),)): 1,
        ("lora_plugin_resident_rows", (("tier", "device"),)): 16,
        ("lora_plugin_resident_rows", (("tier", "host"),)): 2 * 24,
        ("lora_plugin_resident_bytes", (("tier", "device"),)): 2 * 4096,
        ("lora_plugin_resident_bytes", (("tier", "host"),)): 2 * 8192,
        ("lora_plugin_capacity_rows", (("tier", "device"),)): 512,
        ("lora_plugin_capacity_bytes", (("tier", "host"),)): 2 << 20,
        ("lora_plugin_waiting_requests", ()): 6,
        ("lora_plugin_longest_wait_seconds", ()): 1.5,
        ("lora_plugin_loads_total", ()): 10,
        ("lora_plugin_hits_total", ()): 14,
        ("lora_plugin_misses_total", ()): 4,
        ("lora_plugin_evictions_total", (("reason", "room"),)): 3,
        ("lora_plugin_evictions_total", (("reason", "operator"),)): 1,
    }
    assert {key: samples.get(key) for key in expected} == expected


async def test_each_scrape_is_fresh(client: TestClient) -> None:
    await _scraped(client)
    await client.delete("/v1/adapters/sql")
    samples = await _scraped(client)
    assert samples["lora_plugin_adapters", (("state", "listed"),)] == 1
    assert samples["lora_plugin_adapters", (("state", "unloaded"),)] == 1


async def test_engines_that_do_not_answer_leave_the_own_counters(
    client: TestClient, operations: MemoryOperations, metrics: Metrics
) -> None:
    metrics.count_refusal(Code.NOT_READY)
    await _scraped(client)
    for failure in (Unavailable(Code.NOT_READY, "asleep"), RuntimeError("the engine is dead")):
        operations.failure = failure
        samples = await _scraped(client)
        assert samples["lora_plugin_up", ()] == 0
        assert samples["lora_plugin_refused_requests_total", (("code", "not-ready"),)] == 1
        assert not any(name == "lora_plugin_adapters" for name, _ in samples)


async def test_what_the_engines_counted(client: TestClient, operations: MemoryOperations) -> None:
    for name in ("sql", "busy"):
        usage = Usage()
        usage.finished(name, 7, 5)
        usage.finished("sql", 10, 0)
        usage.finished("sql*0.5+busy", 1, 1)
        usage.finished("busy+sql", 1, 1)
        usage.step(0)
        usage.step(3)
        operations.usage.append(usage.to_dict())
        times = LoadTimes(torch.device("cpu"))
        times.add(Stage.PACK, 0.2)
        with times.copy():
            pass
        operations.workers.append({"seconds": times.to_dict(), "plans": {"torch": 4}})
    samples = await _scraped(client)
    assert samples["lora_plugin_requests_total", (("adapter", "sql"),)] == 3
    assert samples["lora_plugin_requests_total", (("adapter", "busy"),)] == 1
    assert samples["lora_plugin_requests_total", (("adapter", "(composition)"),)] == 4
    assert samples["lora_plugin_prompt_tokens_total", (("adapter", "sql"),)] == 27
    assert samples["lora_plugin_generated_tokens_total", (("adapter", "busy"),)] == 5
    assert samples["lora_plugin_step_adapters_bucket", (("le", "0.0"),)] == 2
    assert samples["lora_plugin_step_adapters_bucket", (("le", "2.0"),)] == 2
    assert samples["lora_plugin_step_adapters_bucket", (("le", "4.0"),)] == 4
    assert samples["lora_plugin_step_adapters_sum", ()] == 6
    assert samples["lora_plugin_load_seconds_count", (("stage", "pack"),)] == 2
    assert samples["lora_plugin_load_seconds_sum", (("stage", "pack"),)] == pytest.approx(0.4)
    assert samples["lora_plugin_load_seconds_count", (("stage", "device"),)] == 2
    assert samples["lora_plugin_load_seconds_count", (("stage", "queue"),)] == 0
    assert samples["lora_plugin_kernel_plans_total", (("kernels", "torch"),)] == 8


async def test_the_format_follows_accept(client: TestClient) -> None:
    plain = await client.get("/metrics")
    assert plain.headers["Content-Type"].startswith("text/plain; version=")
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    openmetrics = await client.get("/metrics", headers=accept)
    assert openmetrics.headers["Content-Type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(await openmetrics.text())}
    assert {"lora_plugin_up", "lora_plugin_loads", "lora_plugin_staging_seconds"} <= names


def test_counters() -> None:
    metrics = Metrics()
    metrics.count_refusal(Code.NOT_READY)
    metrics.count_refusal(Code.NOT_READY)
    metrics.count_rejection(Code.NOT_FINITE)
    metrics.staging_seconds.observe(0.2)
    samples = _rendered(metrics)
    assert samples["lora_plugin_refused_requests_total", (("code", "not-ready"),)] == 2
    assert samples["lora_plugin_rejections_total", (("code", "not-finite"),)] == 1
    assert samples["lora_plugin_staging_seconds_sum", ()] == pytest.approx(0.2)
    assert samples["lora_plugin_staging_seconds_bucket", (("le", "0.1"),)] == 0
    assert samples["lora_plugin_staging_seconds_bucket", (("le", "0.25"),)] == 1


async def test_adapter_labels_are_bounded(client: TestClient, operations: MemoryOperations) -> None:
    """In an engine, and over all engines."""
    for engine in range(2):
        usage = Usage()
        for index in range(3 * MAX_NAMES):
            usage.finished(f"adapter-{engine}-{index}", 1, 1)
        usage.finished(f"adapter-{engine}-0", 1, 1)
        assert len(usage.to_dict()["by_name"]) == MAX_NAMES + 1
        operations.usage.append(usage.to_dict())
    for _ in range(2):
        series = {
            labels: value
            for (name, labels), value in (await _scraped(client)).items()
            if name == "lora_plugin_requests_total"
        }
        assert len(series) == MAX_NAMES + 1
        assert sum(series.values()) == 2 * (3 * MAX_NAMES + 1)
        assert series[("adapter", "adapter-0-0"),] == 2


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_distribution_counts_as_prometheus_does(values: list[float]) -> None:
    registry = CollectorRegistry()
    truth = Histogram("h", "h", buckets=SECONDS, registry=registry)
    ours = Distribution()
    for value in values:
        truth.observe(value)
        ours.add(value)
    total = Distribution.total([ours.to_dict(), Distribution().to_dict()])
    expected = [s.value for s in next(iter(registry.collect())).samples if s.name == "h_bucket"]
    assert list(accumulate(total.counts)) == expected
    assert total.sum == pytest.approx(sum(values))


PROCESS = """
from lora_plugin.errors import Code
from lora_plugin.metrics import Metrics, render
metrics = Metrics()
metrics.count_refusal(Code.NOT_READY)
metrics.staging_seconds.observe(0.2)
print(render(metrics.registry)[0].decode(), "=====", render(metrics.registry, with_summed=False)[0].decode())
"""


def test_several_api_servers_are_summed_up(tmp_path: Path) -> None:
    """As the host runs them: each a process, counting into files of one directory."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for count in (1, 2, 3):
        shown = subprocess.run(
            [sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, check=True
        ).stdout
        everything, for_the_host = map(_samples, shown.split("====="))
        assert everything["lora_plugin_refused_requests_total", (("code", "not-ready"),)] == count
        assert everything["lora_plugin_staging_seconds_count", ()] == count
        # The host's own exposition has the sums already; nothing may be there twice.
        assert not any("refused" in name or "staging" in name for name, _ in for_the_host)
        assert for_the_host["lora_plugin_up", ()] == 0


def test_the_bound_holds_between_threads() -> None:
    labels, seen = BoundedLabels(limit=5), set()
    names = [f"a{index}" for index in range(50)]
    threads = [threading.Thread(target=lambda: seen.update(map(labels.label, names))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 6
    assert "other" in seen


def test_the_default_registry_stays_clean() -> None:
    Metrics().count_refusal(Code.NOT_READY)
    assert not any(family.name.startswith("lora_plugin") for family in REGISTRY.collect())


def test_instances_do_not_collide() -> None:
    first, second = Metrics(), Metrics()
    first.count_refusal(Code.NOT_READY)
    assert not any(name == "lora_plugin_refused_requests_total" for name, _ in _rendered(second))
