"""A pool of one slab: as many adapters share it as have room, and the others get their turn."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from collector import Collector
from server import Server
from tiny import logprobs, make_adapter

from lora_plugin.worker.load_times import Stage

FLAGS = ("--enforce-eager", "--max-loras", "1", "--max-lora-rank", "64", "--max-model-len", "4096")
COLLECTOR = Collector()
ENV = {"LORA_PLUGIN_MAX_WAIT_SECONDS": "1", **COLLECTOR.env}
SMALL = [f"small{i}" for i in range(8)]


@pytest.fixture(scope="module")
def ranked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight adapters of rank 8, two of 32, one of 64."""
    root = tmp_path_factory.mktemp("ranked")
    ranks = {**dict.fromkeys(SMALL, 8), "half0": 32, "half1": 32, "whole": 64}
    return {
        name: make_adapter(root / name, model, seed=300 + seed, rank=rank, targets=("q_proj", "v_proj"))
        for seed, (name, rank) in enumerate(ranks.items())
    }


@pytest.fixture(scope="module", autouse=True)
def _all_there(server: Server, ranked: dict[str, Path]) -> None:
    for name, folder in ranked.items():
        server.drop(folder, name)
    for name in ranked:
        server.wait_listed(name)


def test_eight_adapters_of_rank_8_in_one_batch(
    server: Server, model: Path, ranked: dict[str, Path], prompt: list[int]
) -> None:
    for name in SMALL:
        # Else the first may be done before the last is loaded.
        server.complete(name, prompt, 1)

    async def together() -> list:
        return await asyncio.gather(*(server.complete_async(name, prompt, 300) for name in SMALL))

    shared = threading.Event()

    def look() -> None:
        while not shared.is_set() and len(answers) == 0:
            status, pool = server.admin("/v1/pool")
            assert status == 200, pool
            extents = pool["engines"][0]["extents"]
            if sum(extent["requests"] > 0 for extent in extents) == len(SMALL):
                shared.set()

    answers: list = []
    looking = threading.Thread(target=look)
    looking.start()
    answers += asyncio.run(together())
    looking.join()
    assert shared.is_set(), "they never ran together"
    for name, answer in zip(SMALL, answers, strict=True):
        expected = logprobs(model, ranked[name], prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4), name


def test_an_adapter_gets_its_turn_beside_busy_ones(
    server: Server, model: Path, ranked: dict[str, Path], prompt: list[int]
) -> None:
    """Two adapters fill the slab without a gap; a third that needs all of it is answered meanwhile."""
    done = threading.Event()
    streams = 6

    def keep_busy(name: str) -> None:
        while not done.is_set():
            server.complete(name, prompt, 150)

    threads = [threading.Thread(target=keep_busy, args=(f"half{i % 2}",)) for i in range(streams)]
    for thread in threads:
        thread.start()
    try:
        running = server.wait_for(
            lambda: server.admin("/v1/pool")[1]["engines"][0]["rows_free"] == 0, 20, "a full slab"
        )
        assert running < 20
        answer = server.complete("whole", prompt, 8)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    expected = logprobs(model, ranked["whole"], prompt, answer.output)
    assert answer.logprobs == pytest.approx(expected, abs=2e-4)
    engine = server.admin("/v1/pool")[1]["engines"][0]
    assert (engine["waiting_requests"], engine["longest_wait_seconds"]) == (0, 0)


def test_a_load_is_traced_by_the_hosts_provider(
    server: Server, sources: dict[str, Path], prompt: list[int]
) -> None:
    server.drop(sources["beta"], "traced")
    server.wait_listed("traced")
    server.complete("traced", prompt)

    def of_load() -> dict[str, Any]:
        """The spans of its load by name, once that has been sent."""
        spans = list(COLLECTOR.spans)
        loads = [
            s for s in spans if s.name == "lora_plugin.load" and attributes(s)["lora.adapter"] == "traced"
        ]
        return {s.name: s for s in spans for load in loads if s.trace_id == load.trace_id}

    server.wait_for(lambda: len(of_load()) == 4, 10, "four spans")
    spans = of_load()
    whole = spans.pop("lora_plugin.load")
    assert set(spans) == {f"lora_plugin.load.{stage}" for stage in Stage}
    assert {span.parent_span_id for span in spans.values()} == {whole.span_id}
    _, view = server.admin("/v1/adapters/traced")
    assert attributes(whole) == {
        "lora.adapter": "traced",
        "lora.version": view["version"],
        "lora.outcome": "ready",
        "lora.rank": view["rank"],
        "lora.bytes": view["packed_bytes"],
    }


def attributes(span: Any) -> dict[str, Any]:
    values = ((each.key, each.value) for each in span.attributes)
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values}
