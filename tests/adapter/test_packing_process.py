"""The process that packs: what comes out of it is what a thread would have made; and every way it can end."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
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
from lora_plugin.worker import packing, packing_process, shared_memory
from lora_plugin.worker.packing import PackingProcess
from lora_plugin.worker.stager import Job, Outcome, Stager

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


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


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


def test_killed_while_it_is_started_anew(
    process: PackingProcess, layout: ModelLayout, adapters: Path
) -> None:
    """Such as may be when memory is short: where one came up, others will."""
    process.load(adapters, "b", layout, None, LIMIT)
    child(process).kill()
    process._running()
    child(process).kill()
    assert_same(process.load(adapters, "a", layout, None, LIMIT), load(adapters, "a", layout, None, LIMIT))
    assert process._usable


def test_killed_while_it_waits(process: PackingProcess, layout: ModelLayout, adapters: Path) -> None:
    """Nobody notices."""
    process.load(adapters, "b", layout, None, LIMIT)
    child(process).kill()
    assert_same(process.load(adapters, "a", layout, None, LIMIT), load(adapters, "a", layout, None, LIMIT))


def test_an_answer_that_nobody_waited_for_is_not_the_next_adapters(
    process: PackingProcess, layout: ModelLayout, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.load(adapters, "b", layout, None, LIMIT)
    stopped = child(process)
    stopped.suspend()

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(socket, "recv_fds", no_memory)
        with pytest.raises(MemoryError):
            process.load(adapters, "b", layout, None, LIMIT)
    assert_same(process.load(adapters, "a", layout, None, LIMIT), load(adapters, "a", layout, None, LIMIT))
    assert not psutil.pid_exists(stopped.pid)


def test_an_answer_that_breaks_off_leaves_no_memory_behind(layout: ModelLayout) -> None:
    before = descriptors()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        asked = packing._Child.__new__(packing._Child)
        asked._socket = ours
        with Path("/dev/zero").open() as memory:
            socket.send_fds(theirs, [b'{"rank": '], [memory.fileno()])
        theirs.close()
        with pytest.raises(ConnectionResetError):
            asked._reply()
    assert descriptors() == before


def test_nothing_is_imported_from_the_folder_that_the_server_runs_in(
    layout: ModelLayout, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (adapters / "json.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(adapters)
    made = PackingProcess(layout)
    made.load(adapters, "a", layout, None, LIMIT)
    assert child(made).is_running()
    made.close()
    assert not Path("ran").exists()


def test_a_path_is_meant_from_where_the_caller_is_now(
    process: PackingProcess, layout: ModelLayout, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.load(adapters, "b", layout, None, LIMIT)
    monkeypatch.chdir(adapters)
    found = process.load(Path(), "a", layout, None, LIMIT, trusted=True)
    assert_same(found, load(adapters, "a", layout, None, LIMIT))


def test_a_python_without_memfd_create(
    layout: ModelLayout, adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as uv installed for years."""
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.memfd_create\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = PackingProcess(layout)
    assert_same(made.load(adapters, "a", layout, None, LIMIT), load(adapters, "a", layout, None, LIMIT))
    assert child(made).is_running()
    made.close()


def test_a_system_without_memory_to_share_shows_before_the_first_job(
    layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> int:
        raise PermissionError

    monkeypatch.setattr(shared_memory, "create", refused)
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(json.dumps(layout.to_dict()).encode() + b"\n")
        with pytest.raises(PermissionError):
            packing_process.serve(theirs)
        assert ours.recv(1) == b""


def test_memory_that_is_refused_says_why() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            shared_memory.create()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_memory_that_cannot_be_mapped_says_why() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        shared_memory.over(-1, 8, torch.bfloat16)


def test_it_goes_before_the_engine_when_memory_runs_out(
    process: PackingProcess, layout: ModelLayout, adapters: Path
) -> None:
    process.load(adapters, "a", layout, None, LIMIT)
    assert Path(f"/proc/{child(process).pid}/oom_score_adj").read_text() == "1000\n"


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

    before = mappings(), descriptors()
    packed = process.load(adapters, "a", layout, None, LIMIT)
    # A thousand adapters would take a thousand descriptors.
    assert (mappings(), descriptors()) == (before[0] + 1, before[1])
    view = packed.layers[0].a
    del packed
    assert mappings() == before[0] + 1
    del view
    assert (mappings(), descriptors()) == before


def test_it_is_packed_into_the_memory_that_is_handed_over(
    layout: ModelLayout, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a gigabyte takes one, not two."""
    packed: list[PackedAdapter] = []

    def keep(*args: Any, **options: Any) -> PackedAdapter:
        packed.append(load(*args, **options))
        return packed[-1]

    monkeypatch.setattr(packing_process, "load", keep)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        job = {"root": str(adapters), "name": "a", "expected_digest": None, "max_bytes": LIMIT}
        packing_process._answer(theirs, job, layout)
        _, (memory,), _, _ = socket.recv_fds(ours, 1 << 16, 1)
    slab = packing._mapped(memory, packed[0].nbytes, layout)
    assert torch.equal(slab, packed[0].slab)
    packed[0].slab.fill_(7)
    assert (slab == 7).all()


def test_the_process_keeps_nothing_of_an_adapter(
    process: PackingProcess, layout: ModelLayout, adapters: Path
) -> None:
    packed = process.load(adapters, "a", layout, None, LIMIT)
    maps = Path(f"/proc/{child(process).pid}/maps")
    eventually(lambda: "memfd:lora-adapter" not in maps.read_text())
    assert packed.nbytes


@pytest.mark.parametrize("at_work", [False, True])
def test_it_ends_with_the_worker_and_without_a_word(at_work: bool) -> None:
    """Even one that is killed."""
    job = b'{"root": "/", "name": "nobody", "expected_digest": null, "max_bytes": 1}\n'
    script = (
        "import os, signal\n"
        "from lora_plugin.layout import ModelLayout\n"
        "from lora_plugin.worker.packing import PackingProcess\n"
        "layout = ModelLayout((), 'float32', 8, {})\n"
        "process = PackingProcess(layout)\n"
        "child = process._child\n"
        f"if {at_work}:\n"
        "    child.greet(layout)\n"
        "    os.kill(child._process.pid, signal.SIGSTOP)\n"
        f"    child._socket.sendall({job!r})\n"
        "print(child._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    worker.wait()
    os.kill(pid, signal.SIGCONT)
    # Said in full: the child holds the other ends.
    _, said = worker.communicate()
    eventually(lambda: not psutil.pid_exists(pid))
    assert said == b""


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


def staging_thread(stager: Stager, job: Job) -> threading.Thread:
    """The thread that staged it."""
    stager.stage(job)
    eventually(lambda: stager.outcome(job.adapter_id) != Outcome(job=job))
    assert stager.packed(job.adapter_id).rank == 8
    assert stager._thread is not None
    return stager._thread


def test_a_stager_that_is_let_go_takes_thread_and_process_along(layout: ModelLayout, adapters: Path) -> None:
    process = PackingProcess(layout)
    running = child(process)
    stager = Stager(layout, LIMIT, None, loader=process.load)
    thread = staging_thread(stager, Job(1, "a", str(adapters / "a"), ""))
    del stager, process
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    eventually(lambda: not running.is_running() or running.status() == psutil.STATUS_ZOMBIE)


def test_what_is_forgotten_is_given_back_by_the_thread(
    process: PackingProcess, layout: ModelLayout, adapters: Path
) -> None:
    """A step would wait for it."""
    stager = Stager(layout, LIMIT, None, loader=process.load)
    thread = staging_thread(stager, Job(1, "a", str(adapters / "a"), ""))
    gave_back: list[threading.Thread] = []
    weakref.finalize(stager.packed(1).slab, lambda: gave_back.append(threading.current_thread()))
    stager.forget(1)
    eventually(lambda: gave_back == [thread])
    stager.close()


def test_what_is_forgotten_is_given_back_before_the_next_job() -> None:
    """Which may need the memory, however many jobs were there first."""
    slabs: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def made(*_: Any, **__: Any) -> PackedAdapter:
        left.append(sum(slab() is not None for slab in slabs))
        slab = torch.zeros(8)
        slabs.append(weakref.ref(slab))
        if len(slabs) == 2:
            begun.set()
            assert go_on.wait(10)
        return PackedAdapter(8, slab.nbytes, (), slab)

    stager = Stager(llama_layout(), LIMIT, None, loader=made)
    staging_thread(stager, Job(1, "a", "a", ""))
    for adapter_id in (2, 3):
        stager.stage(Job(adapter_id, "a", "a", ""))
    assert begun.wait(10)
    stager.forget(1)
    go_on.set()
    eventually(lambda: len(left) == 3)
    assert left == [0, 1, 1]
    stager.close()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_a_process_that_ends_while_memory_is_given_back_ends_well(shared: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS_AFTER_FORGETTING, *["shared"] * shared],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


_ENDS_AFTER_FORGETTING = """
import os, sys, time, torch
from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.layout import ModelLayout
from lora_plugin.worker import shared_memory
from lora_plugin.worker.stager import Job, Stager

SIZE = 1 << 28

def load(*args, **options):
    if len(sys.argv) > 1:
        memory = shared_memory.create()
        os.ftruncate(memory, SIZE)
        slab = shared_memory.over(memory, SIZE, torch.uint8)
    else:
        slab = torch.empty(SIZE, dtype=torch.uint8)
    return PackedAdapter(8, SIZE, (), slab.fill_(1))

stager = Stager(None, SIZE, None, loader=load)
stager.stage(Job(1, "a", "a", ""))
while stager.outcome(1).packed is None:
    time.sleep(0.01)
stager.forget(1)
time.sleep(0.01)
"""
