"""Nobody waits for ever: a simulated engine takes requests in order, as far as the pool lets it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_plugin.errors import Unavailable
from lora_plugin.pool import AdapterPool, ExtentAllocator

BOUND = 10


@dataclass
class Job:
    """A request: its adapter, when it comes, how many steps it takes."""

    name: str
    adapter: int
    arrives: int
    length: int
    started_at: int | None = None
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.length


class Engine:
    """One step a second; `seats` requests run at a time, in order of arrival.

    `ahead`: their adapters are asked for a step before.
    """

    def __init__(
        self, slabs: int, ranks: Sequence[int], jobs: list[Job], *, seats: int = 64, ahead: bool = False
    ) -> None:
        self.now = 0
        self.seats = seats
        self.ahead = ahead
        self.jobs = sorted(jobs, key=lambda job: job.arrives)
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.pool = AdapterPool(slabs, 16, 10_000, lambda: self.now, max_wait_seconds=BOUND)
        for adapter, rank in enumerate(ranks):
            self.pool.want(adapter, f"a{adapter}", f"{adapter}", "/a", 1)
            self.pool.staged(adapter, rank, 1)

    def preempt(self) -> None:
        """The youngest goes back to the front of the queue, as in the host."""
        if self.running:
            self.waiting.insert(0, self.running.pop())

    def step(self) -> None:
        for job in self.jobs:
            if job.arrives == self.now:
                self.pool.acquire(job.name, job.adapter)
                self.waiting.append(job)
            elif self.ahead and job.arrives == self.now + 1:
                self.pool.hold(job.adapter, 2)
                self.pool.place_ahead(job.adapter)
        assert self.pool.begin_step({job.name: job.adapter for job in self.running}) == ()
        for job in list(self.waiting):
            started = job.started_at is not None
            if len(self.running) < self.seats and self.pool.try_admit(job.adapter, job.name, started=started):
                self.waiting.remove(job)
                self.running.append(job)
                job.started_at = self.now if job.started_at is None else job.started_at
        self.pool.take_orders()
        for job in list(self.running):
            job.left -= 1
            if not job.left:
                self.running.remove(job)
                self.pool.release(job.name)
        self.now += 1

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting and self.now > self.jobs[-1].arrives


def stream(adapter: int, *, every: int, length: int, until: int) -> list[Job]:
    """Requests that keep an adapter busy without a gap."""
    return [Job(f"s{adapter}-{t}", adapter, t, length) for t in range(0, until, every)]


def wait_of(job: Job) -> int:
    assert job.started_at is not None
    return job.started_at - job.arrives


@pytest.mark.parametrize("length", [3, 7])
def test_a_third_adapter_beside_two_busy_ones(length: int) -> None:
    """It waits for the bound and what runs then; before and after it the other slab is never idle."""
    late = Job("late", 2, 5, 4)
    engine = Engine(
        2, [16, 16, 16], [*(j for a in (0, 1) for j in stream(a, every=2, length=length, until=90)), late]
    )
    while engine.now < 60:
        engine.step()
        assert any(job.adapter != 2 for job in engine.running)
    assert BOUND < wait_of(late) <= BOUND + length + 1


def test_only_those_in_the_way_are_held_up() -> None:
    """Of four busy slabs one is set aside, where the fewest requests are in the way."""
    late = Job("late", 4, 5, 4)
    streams = [j for a in range(4) for j in stream(a, every=1 if a else 3, length=6, until=60)]
    engine = Engine(4, [16] * 5, [*streams, late])
    while engine.now < 40:
        engine.step()
    assert wait_of(late) <= BOUND + 7
    held_up = {job.adapter for job in streams if job.arrives < 20 and wait_of(job) > 1}
    assert held_up == {0}


def test_a_rank_that_needs_a_whole_slab_gets_one() -> None:
    """Small adapters come and go in both slabs: without a turn there would never be 16 rows in a row."""
    late = Job("late", 4, 5, 4)
    streams = [j for a in range(4) for j in stream(a, every=3, length=5, until=80)]
    engine = Engine(2, [8, 8, 8, 8, 16], [*streams, late])
    while engine.now < 60:
        engine.step()
    assert BOUND < wait_of(late) <= BOUND + 6


def test_turns_go_by_who_waited_longest() -> None:
    late = [Job(f"late{n}", 1 + n, 3 + n, 4) for n in range(4)]
    engine = Engine(1, [16] * 5, [*stream(0, every=1, length=5, until=80), *late])
    while engine.now < 80:
        engine.step()
    starts = [job.started_at for job in late]
    assert starts == sorted(starts)
    for number, job in enumerate(late):
        assert wait_of(job) <= BOUND + 6 + 4 * number


def test_a_request_that_is_kept_back_holds_up_nobody() -> None:
    """A plugin does not let it run: the rows that were set aside for it are everybody's again."""
    late = Job("late", 1, 3, 4)
    streams = stream(0, every=1, length=5, until=40)
    engine = Engine(1, [16, 16], [*streams, late])
    while engine.now < 3 + BOUND + 3:
        engine.step()
    assert engine.pool.snapshot()["waiting"]["turns"] == 1
    engine.waiting.remove(late)
    engine.pool.stand_back("late")
    while engine.now < 40:
        engine.step()
    assert all(wait_of(job) == 0 for job in streams if job.arrives > 3 + BOUND + 3)
    assert engine.pool.snapshot()["waiting"]["turns"] == 0


def test_a_pin_on_rows_that_were_set_aside_moves_the_turn() -> None:
    late = Job("late", 3, 5, 4)
    streams = [j for a in range(3) for j in stream(a, every=1 if a else 3, length=6, until=60)]
    engine = Engine(3, [16] * 4, [*streams, late])
    while engine.now < 5 + BOUND + 3:
        engine.step()
    assert engine.pool.snapshot()["waiting"]["turns"] == 1
    engine.pool.pin(0)
    while engine.now < 60:
        engine.step()
    assert wait_of(late) <= BOUND + 3 + 7


def test_hundreds_that_have_waited_too_long_cost_a_step_few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 adapters the 32 that fit are in use; 32 others have rows set aside, the rest can have none."""
    time, searched, windows = SimpleNamespace(now=0.0), [], ExtentAllocator.windows

    def counted(self: ExtentAllocator, rows: int, slabs: Collection[int]) -> Any:
        searched.extend(slabs)
        return windows(self, rows, slabs)

    pool = AdapterPool(4, 64, 1 << 20, lambda: time.now, max_wait_seconds=BOUND)
    for adapter_id in range(1, 201):
        pool.want(adapter_id, f"a{adapter_id}", "d", "/a", 10)
        assert pool.staged(adapter_id, 8, 10)
        pool.acquire(f"r{adapter_id}", adapter_id)
    running = {f"r{adapter_id}": adapter_id for adapter_id in range(1, 33)}
    waiting = range(33, 201)
    assert pool.begin_step({}) == ()
    assert all(pool.try_admit(adapter_id) for adapter_id in running.values())
    monkeypatch.setattr(ExtentAllocator, "windows", counted)
    for time.now in (1.0, BOUND + 2.0, BOUND + 3.0):
        searched.clear()
        pool.begin_step(running)
        assert not any(pool.try_admit(adapter_id, f"r{adapter_id}") for adapter_id in waiting)
    assert pool.snapshot()["waiting"]["turns"] == 32
    assert len(searched) <= 4 + 4 + 32, "one for all that can have none, one of all slabs, one for each turn"


def test_the_waiting_are_counted() -> None:
    engine = Engine(1, [16, 16], [*stream(0, every=1, length=4, until=40), Job("late", 1, 3, 2)])
    while engine.now < 10:
        engine.step()
    waiting = engine.pool.snapshot()["waiting"]
    assert waiting == {"requests": 1, "longest_seconds": 7, "turns": 0}
    while engine.now < 40:
        engine.step()
    assert engine.pool.snapshot()["waiting"]["turns"] == 0


JOBS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(
    slabs=st.integers(1, 3),
    ranks=st.lists(st.sampled_from([1, 8, 16]), min_size=6, max_size=6),
    specs=JOBS,
    seats=st.integers(1, 12),
    pins=st.dictionaries(st.integers(0, 50), st.tuples(st.integers(0, 5), st.booleans()), max_size=8),
    preemptions=st.sets(st.integers(0, 60), max_size=8),
    ahead=st.booleans(),
)
def test_everyone_is_served(
    slabs: int,
    ranks: list[int],
    specs: list[tuple[int, int, int]],
    seats: int,
    pins: dict[int, tuple[int, bool]],
    preemptions: set[int],
    ahead: bool,
) -> None:
    """Any arrivals, placed ahead or not, ranks, pins, preemptions: no dead end, and a limit by the rule."""
    jobs = [Job(f"r{n}", *spec) for n, spec in enumerate(specs)]
    engine = Engine(slabs, ranks, jobs, seats=seats, ahead=ahead)
    # One after the other, each after the bound and a generation: nothing can take longer.
    limit = 41 + sum(job.length for job in jobs) + (BOUND + 2) * len(jobs)
    while not engine.idle:
        if engine.now in preemptions:
            engine.preempt()
        if engine.now in pins:
            adapter, wanted = pins[engine.now]
            with suppress(Unavailable):
                (engine.pool.pin if wanted else engine.pool.unpin)(adapter)
        engine.step()
        assert engine.now <= limit
    assert engine.pool.snapshot()["waiting"]["requests"] == 0
    if seats >= len(jobs) and not preemptions:
        longest = max(job.length for job in jobs)
        assert all(wait_of(job) <= BOUND + 1 + (longest + 1) * len(ranks) for job in jobs)
