"""A load is one span with its stages below it, for the tracer provider of the process; nothing without."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import ModelLayout
from lora_plugin.worker.stager import Job, Stager

LAYOUT = ModelLayout((), "float32", 16, {})
PACKED = PackedAdapter(8, 100, (), torch.zeros(0))
SECRET = "/srv/customers/acme"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """The process's provider can be set once only."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def read(root: Path, name: str, *_: Any, **__: Any) -> PackedAdapter:
    time.sleep(0.01)
    if name == "bad":
        raise AdapterRejected(Code.NOT_FINITE, f"a tensor in {root} holds NaN")
    return PACKED


def load(name: str) -> Stager:
    """A stager that has loaded it, or refused it, and ended."""
    stager = Stager(LAYOUT, 1 << 20, None, loader=read)
    stager.stage(Job(7, name, f"{SECRET}/{name}", "d1"))
    stager.close()
    assert stager._thread is not None
    stager._thread.join(10)
    return stager


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_load_is_a_span_with_its_stages(spans: InMemorySpanExporter) -> None:
    stager = load("sql")
    with stager.copying(7):
        time.sleep(0.01)
    found = by_name(spans)
    whole = found.pop("lora_plugin.load")
    assert dict(whole.attributes or {}) == {
        "lora.adapter": "sql",
        "lora.version": "d1",
        "lora.outcome": "ready",
        "lora.rank": 8,
        "lora.bytes": 100,
    }
    assert whole.parent is None
    assert whole.status.is_unset
    assert set(found) == {f"lora_plugin.load.{stage}" for stage in ("queue", "pack", "device")}
    assert all(stage.parent == whole.context for stage in found.values())
    queued, packed, copied = (found[f"lora_plugin.load.{stage}"] for stage in ("queue", "pack", "device"))
    assert seconds(packed) >= 0.01
    assert seconds(copied) >= 0.01
    assert seconds(whole) >= seconds(packed)
    assert whole.start_time is not None
    assert queued.end_time is not None
    assert whole.start_time <= queued.end_time


def test_a_request_that_is_traced_is_not_the_loads_parent(spans: InMemorySpanExporter) -> None:
    with trace.get_tracer("host").start_as_current_span("a step"):
        stager = load("sql")
        with stager.copying(7):
            pass
    found = by_name(spans)
    assert found["lora_plugin.load"].parent is None
    assert found["lora_plugin.load.device"].parent == found["lora_plugin.load"].context


def test_a_refused_load_has_the_code_and_nothing_of_the_path(spans: InMemorySpanExporter) -> None:
    load("bad")
    whole = by_name(spans)["lora_plugin.load"]
    assert (whole.attributes or {})["lora.outcome"] == "not-finite"
    assert whole.status.status_code is trace.StatusCode.ERROR
    assert SECRET not in "".join(span.to_json() for span in spans.get_finished_spans())


def test_what_is_forgotten_leaves_no_span_behind(spans: InMemorySpanExporter) -> None:
    stager = load("sql")
    stager.forget(7)
    assert stager._spans == {}


@pytest.mark.parametrize("absent", ["opentelemetry", "nothing"])
def test_without_the_package_or_a_provider_it_loads_all_the_same(absent: str) -> None:
    script = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        "from lora_plugin.worker import load_spans\n"
        "from lora_plugin.worker.load_times import Stage\n"
        "span = load_spans.LoadSpan('sql', 'd1')\n"
        "span.stage(Stage.QUEUE, 0.1)\n"
        "span.end(None, None)\n"
        "with span.copying(): print('copied', load_spans.trace is None)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"copied {absent == 'opentelemetry'}\n"
