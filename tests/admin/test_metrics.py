from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient
from memory_operations import MemoryOperations
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from lora_plugin.errors import Code, Unavailable
from lora_plugin.metrics import MAX_ADAPTER_LABELS, BoundedLabels, Metrics

DOCS = Path(__file__).parents[2] / "docs" / "admin.md"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _samples(text: str) -> Samples:
    families = parse_text(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def _rendered(metrics: Metrics) -> Samples:
    return _samples(metrics.render()[0].decode())


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
        ("lora_plugin_resident_rows", (("tier", "host"),)): 2 * 16 * 2,
        ("lora_plugin_resident_bytes", (("tier", "device"),)): 2 * 8192,
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
    metrics.count_request("sql")
    await _scraped(client)
    operations.failure = Unavailable(Code.NOT_READY, "asleep")
    samples = await _scraped(client)
    assert samples["lora_plugin_up", ()] == 0
    assert samples["lora_plugin_requests_total", (("adapter", "sql"),)] == 1
    assert not any(name == "lora_plugin_adapters" for name, _ in samples)


async def test_the_format_follows_accept(client: TestClient) -> None:
    plain = await client.get("/metrics")
    assert plain.headers["Content-Type"].startswith("text/plain; version=")
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    openmetrics = await client.get("/metrics", headers=accept)
    assert openmetrics.headers["Content-Type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(await openmetrics.text())}
    assert {"lora_plugin_up", "lora_plugin_loads", "lora_plugin_staging_seconds"} <= names


async def test_every_metric_is_documented_and_prefixed(client: TestClient, metrics: Metrics) -> None:
    metrics.count_request("sql")
    metrics.count_rejection(Code.NOT_FINITE)
    families = list(parse_text(await (await client.get("/metrics")).text()))
    exported = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in families
        if not family.name.endswith("_created")
    }
    section = DOCS.read_text().split("## Metrics")[1].split("\n## ")[0]
    assert exported == set(re.findall(r"`(lora_plugin_\w+)`", section))


def test_counters() -> None:
    metrics = Metrics()
    metrics.count_request("sql")
    metrics.count_request("sql")
    metrics.count_rejection(Code.NOT_FINITE)
    metrics.staging_seconds.observe(0.2)
    samples = _rendered(metrics)
    assert samples["lora_plugin_requests_total", (("adapter", "sql"),)] == 2
    assert samples["lora_plugin_rejections_total", (("code", "not-finite"),)] == 1
    assert samples["lora_plugin_staging_seconds_sum", ()] == pytest.approx(0.2)
    assert samples["lora_plugin_staging_seconds_bucket", (("le", "0.1"),)] == 0
    assert samples["lora_plugin_staging_seconds_bucket", (("le", "0.25"),)] == 1


def test_adapter_labels_are_bounded() -> None:
    metrics = Metrics()
    for index in range(3 * MAX_ADAPTER_LABELS):
        metrics.count_request(f"adapter-{index}")
    metrics.count_request("adapter-0")
    series = {
        labels: value
        for (name, labels), value in _rendered(metrics).items()
        if name.endswith("requests_total")
    }
    assert len(series) == MAX_ADAPTER_LABELS + 1
    assert series[("adapter", "other"),] == 2 * MAX_ADAPTER_LABELS
    assert series[("adapter", "adapter-0"),] == 2


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
    Metrics().count_request("sql")
    assert not any(family.name.startswith("lora_plugin") for family in REGISTRY.collect())


def test_instances_do_not_collide() -> None:
    first, second = Metrics(), Metrics()
    first.count_request("sql")
    assert not any(name == "lora_plugin_requests_total" for name, _ in _rendered(second))
