"""The process that packs: what comes out of it is what a thread would have made; and every way it can end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from adapter_samples import LIMIT, base_model, edit_config, edit_tensors, llama_layout, train
from base_weights import WeightsModel

from lora_plugin.adapter.load import load
from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.errors import Code, LoraPluginError
from lora_plugin.layout import ModelLayout
from lora_plugin.worker import packing
from lora_plugin.worker.packing import PackingProcess

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def layout() -> ModelLayout:
    return llama_layout(dtype="bfloat16")


@pytest.fixture(scope="module")
def process(layout: ModelLayout) -> Iterator[PackingProcess]:
    made = PackingProcess(layout)
    yield made
    made.close()


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """A directory with the adapters "a" and "b"."""
    train(target_modules=ALL, rank_pattern={"q_proj": 3}).save_pretrained(tmp_path / "a")
    train(r=5, target_modules=["q_proj", "lm_head"]).save_pretrained(tmp_path / "b")
    edit_tensors(tmp_path / "b", lambda tensors: {name: 2 * tensor for name, tensor in tensors.items()})
    return tmp_path


def assert_same(found: PackedAdapter, expected: PackedAdapter) -> None:
    assert torch.equal(found.slab, expected.slab)
    facts = ("rank", "rows", "nbytes", "affine", "relative")
    assert [getattr(found, fact) for fact in facts] == [getattr(expected, fact) for fact in facts]
    assert [(part.layer, part.rank) for part in found.layers] == [
        (part.layer, part.rank) for part in expected.layers
    ]
    for part, other in zip(found.layers, expected.layers, strict=True):
        pairs = zip((part.a, *part.b, *part.outputs), (other.a, *other.b, *other.outputs), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def child(process: PackingProcess) -> psutil.Process:
    assert process._child is not None
    return psutil.Process(process._child._process.pid)


def eventually(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("factor", [1.0, -0.5])
def test_it_packs_as_a_thread_would(
    process: PackingProcess, layout: ModelLayout, adapters: Path, name: str, factor: float
) -> None:
    found = process.load(adapters, name, layout, None, LIMIT, factor=factor)
    assert_same(found, load(adapters, name, layout, None, LIMIT, factor=factor))


@pytest.mark.parametrize(
    "config", [{"use_dora": True}, {"lora_bias": True}, {"trainable_token_indices": [1, 5]}], ids=str
)
def test_what_needs_the_base_model_is_packed_beside_it(
    process: PackingProcess, layout: ModelLayout, tmp_path: Path, config: dict[str, Any]
) -> None:
    train(**config).save_pretrained(tmp_path / "a")
    base = WeightsModel(base_model(), layout)
    found = process.load(tmp_path, "a", layout, None, LIMIT, base=base)
    assert found.relative
    assert_same(found, load(tmp_path, "a", layout, None, LIMIT, base=base))


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (Code.NOT_FOUND, {"name": "nobody"}),
        (Code.CHANGED, {"expected_digest": "0" * 64}),
        (Code.TOO_LARGE, {"max_bytes": 1000}),
        (Code.RANK_INVALID, {"name": "bad"}),
    ],
)
def test_refusals_are_those_of_a_thread(
    process: PackingProcess, layout: ModelLayout, adapters: Path, code: Code, arguments: dict[str, Any]
) -> None:
    train().save_pretrained(adapters / "bad")
    edit_config(adapters / "bad", r=-1)
    given = {"root": adapters, "name": "a", "layout": layout, "expected_digest": None, "max_bytes": LIMIT}
    with pytest.raises(LoraPluginError) as found:
        process.load(**given | arguments)
    with pytest.raises(LoraPluginError) as expected:
        load(**given | arguments)
    assert found.value.reason == expected.value.reason
    assert found.value.code is code


def test_what_nobody_thought_of_is_refused_and_ends_nothing(
    process: PackingProcess, layout: ModelLayout, adapters: Path
) -> None:
    before = child(process).pid
    with pytest.raises(LoraPluginError) as found:
        process.load(adapters, "a\0b", layout, None, LIMIT, trusted=True)
    assert (found.value.code, child(process).pid) == (Code.INTERNAL, before)


def kill_beside(process: PackingProcess, load: Callable[[], PackedAdapter]) -> Future[PackedAdapter]:
    """What comes of a load during which the process is killed."""
    running = child(process)
    running.suspend()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(load)
        time.sleep(0.2)
        running.kill()
    return answer


def test_killed_while_it_packs(process: PackingProcess, layout: ModelLayout, adapters: Path) -> None:
    """It is started anew, and does it again."""
    process.load(adapters, "b", layout, None, LIMIT)
    answer = kill_beside(process, lambda: process.load(adapters, "a", layout, None, LIMIT))
    assert_same(answer.result(), load(adapters, "a", layout, None, LIMIT))


def test_what_ends_it_each_time_is_refused(
    process: PackingProcess, layout: ModelLayout, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.load(adapters, "b", layout, None, LIMIT)
    monkeypatch.setattr(packing, "_ATTEMPTS", 1)
    answer = kill_beside(process, lambda: process.load(adapters, "a", layout, None, LIMIT))
    with pytest.raises(LoraPluginError, match="ended") as found:
        answer.result()
    assert found.value.code is Code.INTERNAL
    assert f"exit code {-signal.SIGKILL}" in str(found.value.reason.found)
    assert_same(process.load(adapters, "a", layout, None, LIMIT), load(adapters, "a", layout, None, LIMIT))


def test_killed_while_it_waits(process: PackingProcess, layout: ModelLayout, adapters: Path) -> None:
    """Nobody notices."""
    process.load(adapters, "b", layout, None, LIMIT)
    child(process).kill()
    assert_same(process.load(adapters, "a", layout, None, LIMIT), load(adapters, "a", layout, None, LIMIT))


def test_an_answer_that_nobody_waited_for_is_not_the_next_adapters(
    process: PackingProcess, layout: ModelLayout, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.load(adapters, "b", layout, None, LIMIT)

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(socket, "recv_fds", no_memory)
        with pytest.raises(MemoryError):
            process.load(adapters, "b", layout, None, LIMIT)
    assert_same(process.load(adapters, "a", layout, None, LIMIT), load(adapters, "a", layout, None, LIMIT))


def test_where_no_process_comes_up_the_thread_packs(
    layout: ModelLayout, adapters: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packing, "_MODULE", "lora_plugin.no_such_module")
    made = PackingProcess(layout)
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            assert_same(
                made.load(adapters, name, layout, None, LIMIT), load(adapters, name, layout, None, LIMIT)
            )
    (said,) = [record.message for record in caplog.records]
    assert "no process" in said


def test_memory_is_given_back_with_the_adapter(
    process: PackingProcess, layout: ModelLayout, adapters: Path
) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:lora-adapter")

    before = mappings(), len(list(Path("/proc/self/fd").iterdir()))
    packed = process.load(adapters, "a", layout, None, LIMIT)
    assert mappings() == before[0] + 1
    view = packed.layers[0].a
    del packed
    assert mappings() == before[0] + 1
    del view
    assert (mappings(), len(list(Path("/proc/self/fd").iterdir()))) == before


def test_it_does_not_outlive_the_worker(layout: ModelLayout) -> None:
    """Not even one that is killed."""
    script = (
        "import os, signal, json, sys\n"
        "from lora_plugin.layout import ModelLayout\n"
        "from lora_plugin.worker.packing import PackingProcess\n"
        "process = PackingProcess(ModelLayout((), 'float32', 8, {}))\n"
        "print(process._child._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    eventually(lambda: not psutil.pid_exists(int(said)))


def test_it_stays_off_the_engines_cores_when_it_is_started_anew_too(
    layout: ModelLayout, adapters: Path
) -> None:
    everywhere = psutil.Process().cpu_affinity()
    engine, others = set(everywhere[:1]), set(everywhere[1:])
    os.sched_setaffinity(0, engine)
    try:
        process = PackingProcess(layout)
        found = []
        for _ in range(2):
            process.load(adapters, "a", layout, None, LIMIT)
            found.append(set(child(process).cpu_affinity()) & set(everywhere))
            child(process).kill()
            os.sched_setaffinity(0, others or engine)
    finally:
        os.sched_setaffinity(0, everywhere)
        process.close()
    assert found == [others or engine] * 2


def test_one_thread_after_another_may_use_it(
    process: PackingProcess, layout: ModelLayout, adapters: Path
) -> None:
    """A stager's thread that died is replaced."""
    found: list[PackedAdapter] = []
    for name in ("a", "b"):
        thread = threading.Thread(
            target=lambda name=name: found.append(process.load(adapters, name, layout, None, LIMIT))
        )
        thread.start()
        thread.join()
    for packed, name in zip(found, ("a", "b"), strict=True):
        assert_same(packed, load(adapters, name, layout, None, LIMIT))
