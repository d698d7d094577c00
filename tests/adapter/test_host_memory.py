"""Extents of one block against a plain list of who has what; the stager over it; a block that is locked."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import LIMIT, llama_layout, train
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from lora_plugin.adapter.load import load
from lora_plugin.adapter.pack import PackedAdapter, views
from lora_plugin.composition import PartSource, compose
from lora_plugin.layout import Kind, Layer, ModelLayout, Slice
from lora_plugin.worker import host_memory
from lora_plugin.worker.host_memory import ALIGNMENT, HostMemory, page_locked
from lora_plugin.worker.stager import Job, Stager

SLICE = Slice("a", 4, 4, (0, 4), (0, 4))
LAYOUT = ModelLayout((Layer("a", Kind.LINEAR, (SLICE, SLICE)),), "float32", 64, {})
PER_RANK = 4 * (2 * 4 + 2 * 4)
"""Bytes of A and B, so that four ranks fill what extents are aligned to."""
GRANULES = 12


class FakeEvent:
    """Of a copy that is under way until somebody waits, or says that it is done."""

    def __init__(self) -> None:
        self.done = False
        self.waited_by: list[threading.Thread] = []

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited_by.append(threading.current_thread())
        self.done = True


class Events:
    """Makes them, and knows the last."""

    def __init__(self) -> None:
        self.made: list[FakeEvent] = []

    def __call__(self) -> FakeEvent:
        self.made.append(FakeEvent())
        return self.made[-1]


def adapter(rank: int, value: float = 1.0) -> PackedAdapter:
    """Of these bytes: value, value + 1, ..."""
    slab = torch.arange(rank * PER_RANK // 4, dtype=torch.float32) + value
    return PackedAdapter(rank, slab.nbytes, views([(0, rank, False)], LAYOUT, slab), slab)


def memory(granules: int = GRANULES, events: Callable[[], FakeEvent] = FakeEvent) -> HostMemory:
    return HostMemory(torch.zeros(granules * ALIGNMENT, dtype=torch.uint8), LAYOUT, recorded=events)


def tensors(packed: PackedAdapter) -> list[Tensor]:
    return [packed.slab, *(t for layer in packed.layers for t in (layer.a, *layer.b, *layer.outputs))]


def assert_same(found: PackedAdapter, expected: PackedAdapter) -> None:
    facts = ("rank", "nbytes", "affine", "relative", "parts")
    assert [getattr(found, fact) for fact in facts] == [getattr(expected, fact) for fact in facts]
    assert all(map(torch.equal, tensors(found), tensors(expected)))


@dataclass
class Tenant:
    """Who has these bytes of the block: an adapter, or one that is gone whose copy may still read them."""

    start: int
    stop: int
    bytes: Tensor
    expected: Tensor
    packed: PackedAdapter | None
    event: FakeEvent | None = None

    @property
    def stays(self) -> bool:
        return self.packed is not None or (self.event is not None and not self.event.done)


class Machine(RuleBasedStateMachine):
    """Adapters come, are copied and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.zeros(GRANULES * ALIGNMENT, dtype=torch.uint8)
        self.events = Events()
        self.memory = HostMemory(self.block, LAYOUT, recorded=self.events)
        self.tenants: list[Tenant] = []
        self.adopted = 0

    def room(self, size: int) -> int | None:
        """The first byte of the smallest gap that is large enough, and of several the first."""
        stops = [0, *(tenant.stop for tenant in self.tenants if tenant.stays)]
        starts = [tenant.start for tenant in self.tenants if tenant.stays] + [GRANULES * ALIGNMENT]
        gaps = zip(sorted(stops), sorted(starts), strict=True)
        fitting = [(stop - start, start) for start, stop in gaps if stop - start >= size]
        return min(fitting)[1] if fitting else None

    @rule(rank=st.integers(1, 24))
    def adopt(self, rank: int) -> None:
        self.adopted += 1
        packed = adapter(rank, 1000.0 * self.adopted)
        size = -(-packed.nbytes // ALIGNMENT) * ALIGNMENT
        at_once = self.room(size)
        found = self.memory.adopt(packed)
        # Only for room that there is not does it wait, and so everything is done after that.
        assert at_once is None or not any(event.waited_by for event in self.events.made)
        self.events.made = [event for event in self.events.made if not event.done]
        place = self.room(size) if at_once is None else at_once
        if place is None:
            assert found is packed
            return
        assert found is not packed
        assert_same(found, packed)
        start = found.slab.data_ptr() - self.block.data_ptr()
        assert start == place
        raw = self.block[start : start + packed.nbytes]
        self.tenants = [tenant for tenant in self.tenants if tenant.stays]
        self.tenants.append(Tenant(start, start + size, raw, raw.clone(), found))

    @precondition(lambda self: any(tenant.packed for tenant in self.tenants))
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        tenant = self.any_tenant(data)
        assert tenant.packed is not None
        self.memory.copied(tenant.packed)
        tenant.event = self.events.made[-1]

    @precondition(lambda self: any(tenant.packed for tenant in self.tenants))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.any_tenant(data).packed = None

    @precondition(lambda self: self.events.made)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.events.made)).done = True

    @rule()
    def reclaim(self) -> None:
        self.memory.reclaim()
        stay = sum(tenant.stop - tenant.start for tenant in self.tenants if tenant.stays)
        assert sum(stop - start for start, stop in self.memory.free) == GRANULES * ALIGNMENT - stay

    @invariant()
    def nobody_is_written_over(self) -> None:
        for tenant in self.tenants:
            assert not tenant.stays or torch.equal(tenant.bytes, tenant.expected)

    @invariant()
    def free_extents_are_apart(self) -> None:
        bounds = [bound for extent in self.memory.free for bound in extent]
        assert all(low < high for low, high in pairwise(bounds))

    def any_tenant(self, data: st.DataObject) -> Tenant:
        numbers = [number for number, tenant in enumerate(self.tenants) if tenant.packed]
        return self.tenants[data.draw(st.sampled_from(numbers))]

    def teardown(self) -> None:
        for event in self.events.made:
            event.done = True
        self.tenants.clear()
        self.memory.reclaim()
        assert self.memory.free == ((0, GRANULES * ALIGNMENT),)


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHostMemory = Machine.TestCase


def test_a_move_that_fails_leaves_the_block_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object) -> PackedAdapter:
        raise MemoryError

    host = memory()
    whole = host.free
    monkeypatch.setattr(host_memory, "moved", out_of_memory)
    with pytest.raises(MemoryError):
        host.adopt(adapter(4))
    assert host.free == whole


def test_an_extent_is_not_used_again_before_its_copy_is_done() -> None:
    events = Events()
    host = memory(3, events)
    first = host.adopt(adapter(4, 100.0))
    bytes_of_first = first.slab
    host.copied(first)
    del first
    second = host.adopt(adapter(4, 200.0))
    assert second.slab.data_ptr() != bytes_of_first.data_ptr()
    # Left for later, not waited for.
    assert events.made[0].waited_by == []
    assert torch.equal(bytes_of_first, adapter(4, 100.0).slab)
    events.made[0].done = True
    third = host.adopt(adapter(4, 300.0))
    assert third.slab.data_ptr() == bytes_of_first.data_ptr()


def test_a_copy_is_waited_for_where_there_is_no_other_room() -> None:
    events = Events()
    host = memory(1, events)
    for value in (1.0, 2.0):
        packed = host.adopt(adapter(4, value))
        assert packed.slab.untyped_storage().nbytes() == ALIGNMENT
        host.copied(packed)
        del packed
    assert [len(event.waited_by) for event in events.made] == [1, 0]


@pytest.mark.parametrize("granules", [0, 1])
def test_for_room_that_cannot_be_nothing_is_waited_for(granules: int) -> None:
    events = Events()
    host = memory(granules, events)
    packed = host.adopt(adapter(4))
    host.copied(packed)
    larger = adapter(8)
    assert host.adopt(larger) is larger
    assert events.made[0].waited_by == []


def test_events_are_asked_on_the_device_that_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thread that says none CUDA makes a context on the first."""
    current, asked = [0], []

    @contextmanager
    def on(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    class OnDevice(FakeEvent):
        def query(self) -> bool:
            asked.append(current[-1])
            return super().query()

        def synchronize(self) -> None:
            asked.append(current[-1])
            super().synchronize()

    monkeypatch.setattr(torch.cuda, "device", on)
    block = torch.zeros(ALIGNMENT, dtype=torch.uint8)
    host = HostMemory(block, LAYOUT, device=1, recorded=OnDevice)
    packed = host.adopt(adapter(4))
    host.copied(packed)
    del packed
    host.adopt(adapter(4))
    # Looked at, waited for, looked at again.
    assert (asked, current) == ([1, 1, 1], [0])


def test_only_the_last_copy_of_an_adapter_counts() -> None:
    events = Events()
    host = memory(2, events)
    packed = host.adopt(adapter(4))
    host.copied(packed)
    host.copied(packed)
    events.made[0].done = True
    slab = packed.slab
    del packed
    other = host.adopt(adapter(4))
    assert other.slab.data_ptr() != slab.data_ptr()


def test_in_ordinary_memory_it_is_kept_until_its_copy_is_done_too() -> None:
    events = Events()
    host = memory(0, events)
    packed = adapter(4)
    assert host.adopt(packed) is packed
    host.copied(packed)
    kept = weakref.ref(packed)
    del packed
    host.reclaim()
    assert kept() is not None
    events.made[0].done = True
    host.reclaim()
    assert kept() is None


def test_what_finds_no_room_stays_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    host = memory(2)
    first, third = host.adopt(adapter(4)), adapter(8)
    with caplog.at_level(logging.DEBUG, "lora_plugin"):
        assert host.adopt(third) is third
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    del first
    assert host.adopt(third) is not third


def test_nothing_takes_nothing() -> None:
    host = memory(1)
    none = PackedAdapter(0, 0, (), torch.zeros(0))
    assert host.adopt(none) is none
    assert host.free == ((0, ALIGNMENT),)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def staged(stager: Stager, job: Job) -> PackedAdapter:
    stager.stage(job)
    eventually(lambda: (outcome := stager.outcome(job.adapter_id)) is not None and outcome.packed is not None)
    return stager.packed(job.adapter_id)


def any_version(root: Path, name: str, layout: ModelLayout, _: Any, *args: Any, **options: Any) -> Any:
    return load(root, name, layout, None, *args, **options)


def test_the_stager_serves_the_same_from_a_block(tmp_path: Path) -> None:
    """One with DoRA, whose outputs move along, and one of parts."""
    layout = llama_layout(dtype="bfloat16")
    train(use_dora=True).save_pretrained(tmp_path / "dora")
    train(r=5, target_modules=["q_proj", "lm_head"]).save_pretrained(tmp_path / "plain")
    parts = [PartSource(str(tmp_path / "plain"), "5f" * 32, weight) for weight in (0.5, 2.0)]
    mix = compose("mix", [], parts)
    block = torch.zeros(1 << 20, dtype=torch.uint8)
    host = HostMemory(block, layout, recorded=FakeEvent)
    with_block, without = (
        Stager(layout, LIMIT, None, host=given, loader=any_version) for given in (host, None)
    )
    bounds = block.data_ptr(), block.data_ptr() + block.numel()
    for job in (
        Job(1, "dora", str(tmp_path / "dora"), ""),
        Job(2, mix.name, mix.path, mix.digest),
    ):
        found, expected = staged(with_block, job), staged(without, job)
        assert_same(found, expected)
        assert all(bounds[0] <= tensor.data_ptr() < bounds[1] for tensor in tensors(found))
        assert not any(bounds[0] <= tensor.data_ptr() < bounds[1] for tensor in tensors(expected))
    assert with_block.packed(1).affine
    for stager in (with_block, without):
        stager.close()


def test_the_copy_is_noted_when_it_has_been_queued() -> None:
    events = Events()
    stager = Stager(LAYOUT, LIMIT, None, host=memory(1, events), loader=lambda *_, **__: adapter(4))
    packed = staged(stager, Job(1, "a", "a", ""))
    with stager.copying(1) as copied:
        assert copied is packed
        assert events.made == []
    (event,) = events.made
    slab = packed.slab
    del packed, copied
    stager.forget(1)
    eventually(lambda: stager._forgotten == [])
    # Needed now, so it is waited for: by the stager's thread.
    assert staged(stager, Job(2, "b", "b", "")).slab.data_ptr() == slab.data_ptr()
    assert event.waited_by == [stager._thread]
    stager.close()


def test_what_is_forgotten_gives_its_extent_back() -> None:
    host = memory(1)
    stager = Stager(LAYOUT, LIMIT, None, host=host, loader=lambda *_, **__: adapter(4))
    staged(stager, Job(1, "a", "a", ""))
    assert host.free == ()
    stager.forget(1)
    eventually(lambda: host.free == ((0, ALIGNMENT),))
    stager.close()


def test_what_is_forgotten_while_it_is_loaded_gives_its_extent_back() -> None:
    host, begun, go_on = memory(1), threading.Event(), threading.Event()

    def made(*_: Any, **__: Any) -> PackedAdapter:
        begun.set()
        assert go_on.wait(10)
        return adapter(4)

    stager = Stager(LAYOUT, LIMIT, None, host=host, loader=made)
    stager.stage(Job(1, "a", "a", ""))
    assert begun.wait(10)
    stager.forget(1)
    go_on.set()
    assert staged(stager, Job(2, "b", "b", "")).slab.untyped_storage().nbytes() == ALIGNMENT
    stager.close()


class Runtime:
    """Stands for CUDA's: locks what it is given, or refuses to."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.launched = 0
        self.registered: list[tuple[int, int, int]] = []
        self.unregistered: list[int] = []

    def launch(self, *_: Any, **__: Any) -> None:
        self.launched += 1
        raise RuntimeError("CUDA error: out of memory, in a call before this one")

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered.append((address, nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        # Still mapped: an address that is not would end the process here.
        ctypes.c_ubyte.from_address(address).value = 1
        self.unregistered.append(address)
        return 0


@pytest.fixture
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(getattr(request, "param", 0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch, "ones", made.launch)
    return made


def test_a_block_is_locked_once_and_for_as_long_as_it_is_used(runtime: Runtime) -> None:
    block = page_locked(5 * mmap.PAGESIZE + 1)
    address, nbytes = block.data_ptr(), 5 * mmap.PAGESIZE + ALIGNMENT
    assert (block.dtype, block.shape) == (torch.uint8, (nbytes,))
    assert not block.any()
    assert (runtime.registered, runtime.launched) == ([(address, nbytes, 0)], 0)
    view = block[7:9]
    del block
    view.fill_(3)
    assert runtime.unregistered == []
    del view
    assert runtime.unregistered == [address]


@pytest.mark.parametrize("runtime", [2], indirect=True)
def test_what_cannot_be_locked_is_said_and_does_without(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    block = page_locked(1 << 20)
    assert (block.dtype, block.numel(), runtime.unregistered) == (torch.uint8, 0, [])
    # What the runtime remembers of it is taken by a kernel of ours, not by the model's next one.
    assert runtime.launched == 1
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "CUDA error 2" in record.message
    packed = adapter(4)
    assert HostMemory(block, LAYOUT).adopt(packed) is packed


def test_what_cannot_be_had_is_said_and_does_without(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_memory.mmap, "mmap", refuse)
    assert page_locked(1 << 20).numel() == 0
    assert runtime.registered == []
    (record,) = caplog.records
    assert "Cannot allocate memory" in record.message
