"""Single decisions of the pool, each by hand."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from random import Random
from typing import Any

import pytest

from lora_plugin.errors import (
    AdapterBusy,
    AdapterNotFound,
    AdapterRejected,
    Code,
    LoraPluginError,
    Reason,
    Unavailable,
)
from lora_plugin.pool import AdapterPool, Drop, Entry, ExtentAllocator, Forget, Host, Load, Orders
from lora_plugin.pool.versions import Versions


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def want(pool: AdapterPool, adapter_id: int, nbytes: int = 10) -> bool:
    return pool.want(adapter_id, f"a{adapter_id}", f"{adapter_id:064x}", f"/adapters/a{adapter_id}", nbytes)


def stage(pool: AdapterPool, adapter_id: int, rank: int = 8, nbytes: int = 10) -> None:
    assert want(pool, adapter_id, nbytes)
    assert pool.staged(adapter_id, rank, nbytes)


def make(slabs: int = 2, slab_rows: int = 16, budget: int = 1000, **ranks: int) -> AdapterPool:
    """A pool with ready adapters: a1=8 is adapter 1 of rank 8."""
    pool = AdapterPool(slabs, slab_rows, budget, Clock())
    for name, rank in ranks.items():
        stage(pool, int(name[1:]), rank)
    return pool


def admit(pool: AdapterPool, *adapter_ids: int, running: tuple[int, ...] = ()) -> list[bool]:
    """A step that the running adapters are in and these try to join."""
    assert pool.begin_step({f"run{i}": i for i in running}) == ()
    return [pool.try_admit(adapter_id) for adapter_id in adapter_ids]


def resident(pool: AdapterPool) -> set[int]:
    return {int(extent["id"]) for slab in pool.snapshot()["extents"] for extent in slab}


def ready(pool: AdapterPool) -> set[int]:
    return {int(a["id"]) for a in pool.snapshot()["adapters"] if a["host"] == "ready"}


def host_state(pool: AdapterPool, adapter_id: int) -> Host | None:
    entry = pool.get(adapter_id)
    return None if entry is None else entry.host


def code_of(error: pytest.ExceptionInfo[LoraPluginError]) -> Code:
    return error.value.code


def test_loads_at_the_lowest_rows_and_says_so_once() -> None:
    pool = make(a1=8, a2=3, a3=16)
    assert admit(pool, 1, 2, 3) == [True, True, True]
    assert pool.take_orders() == (Load(1, 0), Load(2, 8), Load(3, 16))
    assert not pool.has_orders
    assert admit(pool, 1, 2, 3) == [True, True, True]
    assert pool.take_orders() == ()


def test_slab_rows_are_rounded_up_to_the_granule() -> None:
    assert make(slab_rows=1).snapshot()["slab_rows"] == 8
    assert make(slab_rows=9).snapshot()["slab_rows"] == 16


def test_more_adapters_than_slabs_when_their_extents_fit() -> None:
    pool = make(a1=8, a2=8, a3=8, a4=8, a5=8)
    assert admit(pool, 1, 2, 3, 4, 5) == [True, True, True, True, False]


def test_the_least_recently_used_goes_first() -> None:
    pool = make(a1=16, a2=16, a3=16)
    admit(pool, 1)
    admit(pool, 2)
    admit(pool, 1)
    pool.take_orders()
    assert admit(pool, 3) == [True]
    assert pool.take_orders() == (Drop(2), Load(3, 16))


def test_room_is_made_where_the_latest_use_is_oldest() -> None:
    pool = make(a1=8, a2=8, a3=16, a4=16)
    admit(pool, 1, 3)
    admit(pool, 2)
    pool.take_orders()
    assert admit(pool, 4) == [True]
    assert pool.take_orders() == (Drop(3), Load(4, 16))


def test_only_as_many_as_needed_go() -> None:
    pool = make(slabs=1, slab_rows=24, a1=8, a2=8, a3=8, a4=16)
    admit(pool, 3, 1, 2)
    pool.take_orders()
    assert admit(pool, 4) == [True]
    assert pool.take_orders() == (Drop(3), Drop(1), Load(4, 0))


def test_what_is_in_use_stays_until_the_next_step() -> None:
    pool = make(slabs=1, a1=16, a2=16)
    assert admit(pool, 1, 2) == [True, False]
    assert admit(pool, 2, running=(1,)) == [False]
    assert admit(pool, 2) == [True]


def test_a_finished_request_frees_its_adapter_within_the_step() -> None:
    pool = make(slabs=1, a1=16, a2=16)
    pool.acquire("r", 1)
    assert admit(pool, 1, 2) == [True, False]
    pool.release("r")
    assert pool.try_admit(2)


@pytest.mark.parametrize("host", ["unknown", "staging", "waiting", "failed"])
def test_what_is_not_ready_evicts_nobody(host: str) -> None:
    pool = make(slabs=1, budget=20, a1=16)
    admit(pool, 1)
    admit(pool)
    pool.take_orders()
    pool.hold(1, 60)
    if host != "unknown":
        want(pool, 2, 20 if host == "waiting" else 10)
    if host == "failed":
        pool.failed(2, Reason(Code.NOT_FINITE, "tensor holds NaN"))
        assert pool.take_orders() == (Forget(2),)
    assert not pool.try_admit(2)
    assert pool.take_orders() == ()
    assert resident(pool) == {1}


def test_running_adapters_without_a_place_are_named() -> None:
    pool = make(slabs=1, a1=16, a2=16)
    assert pool.begin_step({"r1": 1, "r2": 2, "r7": 7}) == (2, 7)


def test_an_adapter_is_asked_for_once() -> None:
    pool = make()
    assert want(pool, 1)
    assert not want(pool, 1)
    assert pool.staged(1, 8, 10)
    assert not want(pool, 1)


def test_host_room_comes_from_the_least_recently_used() -> None:
    pool = make(budget=30, a1=8, a2=8, a3=8)
    pool.acquire("r", 1)
    pool.release("r")
    assert want(pool, 4)
    assert pool.take_orders() == ()
    assert pool.staged(4, 8, 10)
    assert pool.take_orders() == (Forget(2),)
    assert ready(pool) == {1, 3, 4}


def test_one_that_is_refused_while_it_is_read_costs_no_other_its_copy() -> None:
    pool = make(budget=20, a1=8, a2=8)
    assert want(pool, 3)
    assert not want(pool, 4), "beyond the budget, one at a time"
    pool.failed(3, Reason(Code.NOT_FINITE, "NaN"))
    assert ready(pool) == {1, 2}
    assert pool.take_orders() == (Forget(3),)
    assert want(pool, 4)
    assert pool.host_free == -10


def test_the_cost_of_a_reload_decides_where_it_is_the_policy() -> None:
    """Equal use: the one whose bytes are back the soonest goes; used more, or the only one left, it stays."""
    pool = AdapterPool(1, 8, 40, Clock(), eviction="cost")
    for adapter_id, nbytes, seconds in ((1, 10, 1.0), (2, 10, 0.1), (3, 20, 1.0)):
        want(pool, adapter_id, nbytes)
        pool.staged(adapter_id, 8, nbytes, seconds)
    for number in range(8):
        pool.acquire(f"r{number}", 1)
        pool.release(f"r{number}")
    want(pool, 4, 10)
    pool.staged(4, 8, 10, 1.0)
    assert ready(pool) == {1, 3, 4}
    want(pool, 5, 10)
    pool.staged(5, 8, 10, 1.0)
    assert ready(pool) == {1, 4, 5}


def test_a_copy_that_is_worth_the_same_as_before_goes_once() -> None:
    pool = AdapterPool(1, 8, 20, Clock(), eviction="cost")
    stage(pool, 1)
    for _ in range(3):
        pool.hold(1, 0)
    want(pool, 2, 20)
    assert pool.staged(2, 8, 20)
    assert pool.take_orders() == (Forget(1),)


def test_what_was_used_a_lot_long_ago_goes_in_the_end() -> None:
    pool = AdapterPool(1, 8, 20, Clock(), eviction="cost")
    want(pool, 1)
    pool.staged(1, 8, 10, 1.0)
    for number in range(5):
        pool.acquire(f"r{number}", 1)
        pool.release(f"r{number}")
    for adapter_id in range(2, 12):
        want(pool, adapter_id)
        pool.staged(adapter_id, 8, 10, 1.0)
    assert 1 not in ready(pool)


def test_forgetting_takes_an_idle_adapter_off_the_device_first() -> None:
    pool = make(budget=10, a1=8)
    admit(pool, 1)
    admit(pool)
    assert want(pool, 2)
    assert pool.staged(2, 8, 10)
    assert pool.take_orders() == (Load(1, 0), Drop(1), Forget(1))


@pytest.mark.parametrize("guard", ["referenced", "held", "pinned", "running", "staging"])
def test_without_evictable_copies_a_newcomer_waits(guard: str) -> None:
    pool = make(budget=20, a1=8)
    match guard:
        case "referenced":
            pool.acquire("r", 1)
        case "held":
            assert pool.hold(1, 5)
        case "pinned":
            pool.pin(1)
        case "running":
            admit(pool, 1)
        case "staging":
            pool.evict(1)
            assert want(pool, 1)
    pool.take_orders()
    assert not want(pool, 2, 15)
    assert host_state(pool, 2) is Host.WAITING
    assert pool.take_orders() == ()
    assert want(pool, 3, 10), "a smaller one has room"


def test_that_there_is_no_room_is_found_out_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make(budget=100, **{f"a{i}": 8 for i in range(1, 11)})
    for i in range(1, 11):
        pool.acquire(f"r{i}", i)
    looked_at, evictable = [], Versions.evictable

    def counted(self: Versions, entry: Entry) -> bool:
        looked_at.append(entry.adapter_id)
        return evictable(self, entry)

    monkeypatch.setattr(Versions, "evictable", counted)
    with pool.moment():
        assert not any(want(pool, 100 + i) for i in range(50))
        assert len(looked_at) == 10
        assert not want(pool, 200, 5)
        assert len(looked_at) == 20, "a smaller one could have room"
    pool.release("r3")
    with pool.moment():
        assert want(pool, 100)


def test_nobody_is_evicted_in_vain() -> None:
    pool = make(budget=30, a1=8, a2=8)
    pool.acquire("r", 2)
    assert not want(pool, 3, 25)
    assert ready(pool) == {1, 2}


def test_a_lease_ends_with_time() -> None:
    clock = Clock()
    pool = AdapterPool(1, 8, 10, clock)
    stage(pool, 1)
    pool.hold(1, 5)
    pool.hold(1, 2)
    clock.now += 4.9
    assert not want(pool, 2)
    clock.now += 0.2
    assert want(pool, 2)


def test_only_ready_versions_can_be_held() -> None:
    pool = make()
    assert not pool.hold(1, 5)
    want(pool, 1)
    assert not pool.hold(1, 5)
    pool.staged(1, 8, 10)
    assert pool.hold(1, 5)


def test_an_adapter_larger_than_the_cache_is_rejected_unregistered() -> None:
    pool = make(budget=20)
    with pytest.raises(AdapterRejected) as error:
        want(pool, 1, 21)
    assert code_of(error) is Code.HOST_CACHE_FULL
    assert pool.get(1) is None


def test_an_id_of_another_adapter_is_an_error() -> None:
    pool = make(a1=8)
    for name, digest in (("other", f"{1:064x}"), ("a1", "f" * 64)):
        with pytest.raises(AdapterRejected) as error:
            pool.want(1, name, digest, "/adapters/other", 10)
        assert code_of(error) is Code.ID_CLASH
    assert ready(pool) == {1}


def test_the_real_size_counts() -> None:
    pool = make(budget=30, a1=8)
    want(pool, 2)
    assert pool.staged(2, 8, 15)
    assert pool.snapshot()["host_bytes"] == 25
    want(pool, 3, 5)
    assert pool.staged(3, 8, 20)
    assert ready(pool) == {3}
    assert pool.take_orders() == (Forget(1), Forget(2))


def test_a_copy_that_grew_out_of_the_room_is_forgotten_and_waits() -> None:
    pool = make(budget=20, a1=8)
    pool.acquire("r", 1)
    want(pool, 2)
    assert not pool.staged(2, 8, 15)
    assert pool.take_orders() == (Forget(2),)
    assert pool.snapshot()["host_bytes"] == 10
    pool.release("r")
    assert want(pool, 2, 15)


@pytest.mark.parametrize(
    ("rank", "nbytes", "code"), [(17, 10, Code.RANK_TOO_LARGE), (8, 1001, Code.HOST_CACHE_FULL)]
)
def test_a_copy_that_never_fits_is_rejected(rank: int, nbytes: int, code: Code) -> None:
    pool = make()
    want(pool, 1)
    with pytest.raises(AdapterRejected) as error:
        pool.staged(1, rank, nbytes)
    assert code_of(error) is code
    assert pool.take_orders() == (Forget(1),)
    assert pool.get(1) is None
    assert pool.snapshot()["host_bytes"] == 0
    assert pool.snapshot()["counters"]["failures"] == {str(code): 1}


def test_a_copy_nobody_waits_for_is_forgotten() -> None:
    pool = make()
    want(pool, 1)
    pool.retire(1)
    assert pool.take_orders() == (Forget(1),)
    assert not pool.staged(1, 8, 10)
    assert pool.take_orders() == (Forget(1),)


def test_what_requests_miss_is_staged_again() -> None:
    pool = make(budget=20, a1=8, a2=8)
    pool.evict(1)
    pool.acquire("r1", 1)
    pool.acquire("r2", 2)
    pool.acquire("r9", 9)
    assert [entry.path for entry in pool.restage()] == ["/adapters/a1"]
    assert pool.restage() == ()
    assert pool.staged(1, 8, 10)


def test_a_request_counts_once_and_ends_once() -> None:
    pool = make(a1=8)
    pool.acquire("r", 1)
    pool.acquire("r", 1)
    with pytest.raises(AdapterBusy):
        pool.evict(1)
    pool.release("r")
    pool.release("r")
    pool.release("unknown")
    assert pool.evict(1)


def test_the_last_of_several_requests_counts() -> None:
    pool = make(slabs=1, a1=16, a2=16)
    pool.acquire("r1", 1)
    pool.acquire("r2", 1)
    admit(pool, 1)
    pool.release("r1")
    assert not pool.try_admit(2)
    with pytest.raises(AdapterBusy):
        pool.evict(1)
    pool.release("r2")
    assert pool.try_admit(2)


def test_a_request_can_change_its_adapter() -> None:
    pool = make(a1=8, a2=8)
    pool.acquire("r", 1)
    pool.acquire("r", 2)
    assert pool.evict(1)
    with pytest.raises(AdapterBusy):
        pool.evict(2)


def test_hits_and_misses_count_requests() -> None:
    pool = make(a1=8)
    pool.acquire("r1", 1)
    admit(pool, 1)
    admit(pool, 1)
    pool.acquire("r2", 1)
    pool.acquire("r3", 99)
    totals = pool.snapshot()["counters"]
    assert (totals["hits"], totals["misses"], totals["loads"]) == (1, 2, 1)


def test_a_renewal_while_the_copy_is_made_anew_ends_no_lease() -> None:
    """New base weights took it; the response that leased it goes on."""
    pool = make(a1=8)
    pool.lease("server", 1, 60)
    pool.retire(1)
    pool.discard(1)
    pool.acquire("r", 1)
    assert [entry.adapter_id for entry in pool.restage()] == [1]
    pool.release("r")
    assert not pool.lease("server", 1, 60)
    assert pool.staged(1, 8, 10)
    pool.lease("server", 1, 0)
    assert pool.get(1) is None


def test_placed_ahead_it_is_there_when_its_request_comes() -> None:
    pool = make(slabs=1, a1=16, a2=16)
    admit(pool, 1)
    admit(pool)
    pool.take_orders()
    pool.place_ahead(2)
    assert pool.take_orders() == (Drop(1), Load(2, 0))
    pool.acquire("r", 2)
    assert admit(pool, 2) == [True]
    assert pool.take_orders() == ()


def test_placed_ahead_of_its_request_is_no_hit() -> None:
    """The next request finds it by its own merit."""
    pool = make(a1=8)
    for request in ("r1", "r2"):
        pool.place_ahead(1)
        pool.acquire(request, 1)
    totals = pool.snapshot()["counters"]
    assert (totals["hits"], totals["misses"], totals["loads"]) == (1, 1, 1)


@pytest.mark.parametrize("busy", ["running", "waiting", "held", "leased", "pinned"])
def test_nobody_busy_goes_for_one_that_is_placed_ahead(busy: str) -> None:
    pool = make(slabs=2, a1=16, a2=16, a3=16)
    admit(pool, 1, 2)
    for adapter_id in (1, 2):
        match busy:
            case "waiting":
                pool.acquire(f"r{adapter_id}", adapter_id)
            case "held":
                pool.hold(adapter_id, 2)
            case "leased":
                pool.lease("server", adapter_id, 30)
            case "pinned" if adapter_id == 1:
                pool.pin(adapter_id)
            case "pinned":
                pool.hold(adapter_id, 2)
    if busy != "running":
        admit(pool)
    pool.take_orders()
    pool.place_ahead(3)
    assert pool.take_orders() == ()
    assert resident(pool) == {1, 2}


def test_nobody_goes_in_the_place_of_one_that_is_held() -> None:
    """The one used last would: the other's hold ends in a moment, and the request may wait for it."""
    pool = make(slabs=2, a1=16, a2=16, a3=16)
    admit(pool, 1)
    admit(pool, 2)
    admit(pool)
    pool.take_orders()
    pool._versions.get(1).hold_until = 1002.0  # type: ignore[union-attr]
    pool.place_ahead(3)
    assert pool.take_orders() == ()
    assert admit(pool, 3) == [True]
    assert resident(pool) == {2, 3}


def test_nobody_is_placed_ahead_of_those_that_wait_for_room() -> None:
    """The next step would drop it again: a copy for nothing."""
    pool = make(slabs=1, a1=16, a2=16, a3=16)
    pool.acquire("r1", 1)
    pool.acquire("r2", 2)
    pool.begin_step({})
    assert pool.try_admit(1, "r1")
    assert not pool.try_admit(2, "r2")
    pool.take_orders()
    pool.release("r1")
    pool.place_ahead(3)
    pool.begin_step({})
    assert pool.try_admit(2, "r2")
    assert pool.take_orders() == (Drop(1), Load(2, 0))


def test_of_many_a_few_are_placed_ahead_before_each_step() -> None:
    pool = make(slabs=9, **{f"a{adapter_id}": 16 for adapter_id in range(1, 10)})
    loads = []
    for _ in range(3):
        for adapter_id in range(1, 10):
            pool.place_ahead(adapter_id)
        loads.append(len(pool.take_orders()))
        admit(pool)
    assert loads == [4, 4, 1]


def test_without_room_ahead_the_search_is_not_repeated_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches = []
    windows = ExtentAllocator.windows

    def counted(self: ExtentAllocator, *args: Any) -> Any:
        searches.append(args)
        return windows(self, *args)

    pool = make(slabs=1, **{f"a{adapter_id}": 16 for adapter_id in range(1, 52)})
    pool.acquire("r", 1)
    assert admit(pool, 1) == [True]
    monkeypatch.setattr(ExtentAllocator, "windows", counted)
    for _ in range(2):
        searches.clear()
        for adapter_id in range(2, 52):
            pool.place_ahead(adapter_id)
        assert len(searches) == 1
        admit(pool, running=(1,))


def test_what_left_after_it_was_placed_ahead_is_a_hit_when_it_is_back() -> None:
    pool = make(slabs=2, a1=16, a2=16, a3=16)
    pool.place_ahead(1)
    admit(pool, 2, 3)
    assert resident(pool) == {2, 3}
    admit(pool)
    pool.pin(1)
    pool.acquire("r", 1)
    totals = pool.snapshot()["counters"]
    assert (totals["hits"], totals["misses"]) == (1, 0)


def test_rows_set_aside_are_not_taken_ahead() -> None:
    pool = AdapterPool(1, 16, 1000, clock := Clock(), max_wait_seconds=10)
    for adapter_id in (1, 2, 3):
        stage(pool, adapter_id, rank=16)
    pool.acquire("r1", 1)
    pool.acquire("r2", 2)
    pool.begin_step({})
    assert pool.try_admit(1, "r1")
    assert not pool.try_admit(2, "r2")
    clock.now += 11
    pool.begin_step({"r1": 1})
    pool.release("r1")
    pool.take_orders()
    pool.place_ahead(3)
    assert pool.take_orders() == ()
    assert pool.try_admit(2, "r2")


def test_a_pin_that_waits_for_room_is_placed_as_a_pin() -> None:
    pool = make(slabs=2, a1=16, a2=16, a3=16)
    pool.acquire("r", 1)
    admit(pool, 1, 2)
    pool.pin(3)
    pool.take_orders()
    pool.release("r")
    pool.place_ahead(3)
    assert pool.take_orders() == ()
    admit(pool, running=(2,))
    assert resident(pool) == {2, 3}


def test_a_lease_ends_also_when_the_host_copy_is_lost() -> None:
    pool = make(a1=8)
    pool.lease("server", 1, 30)
    pool.discard(1)
    pool.retire(1)
    assert not pool.lease("server", 1, 0)
    assert pool.get(1) is None


def test_pins_are_packed_and_leave_one_slab() -> None:
    pool = make(slabs=3, a1=8, a2=16, a3=8, a4=8)
    for adapter_id in (1, 2, 3):
        pool.pin(adapter_id)
    assert pool.take_orders() == (Load(1, 0), Load(2, 16), Load(3, 8))
    with pytest.raises(Unavailable) as error:
        pool.pin(4)
    assert code_of(error) is Code.POOL_FULL
    pool.unpin(2)
    pool.pin(4)


def test_a_pin_moves_to_the_newer_version() -> None:
    """The older one is kept by a response that runs: it is not told to be retired yet."""
    pool = make(slabs=2, a1=16, a3=16)
    pool.want(2, "a1", "newer", "/adapters/a1", 10)
    pool.staged(2, 16, 10)
    pool.pin(1)
    pool.acquire("r", 1)
    pool.begin_step({"r": 1})
    pool.pin(2)
    assert [pool.get(i).pinned for i in (1, 2)] == [False, True]
    assert resident(pool) == {1, 2}
    assert not pool.try_admit(3)
    pool.release("r")
    assert admit(pool, 3) == [True]
    assert resident(pool) == {2, 3}
    with pytest.raises(Unavailable):
        pool.pin(3)
    pool.want(4, "a1", "newest", "/adapters/a1", 10)
    with pytest.raises(Unavailable):
        pool.pin(4)
    assert [pool.get(i).pinned for i in (2, 4)] == [True, False]


def test_a_single_slab_takes_no_pin() -> None:
    pool = make(slabs=1, a1=8)
    with pytest.raises(Unavailable):
        pool.pin(1)
    assert pool.take_orders() == ()


def test_a_pin_is_never_evicted() -> None:
    pool = make(a1=8, a2=16, a3=16, a4=8)
    pool.pin(1)
    assert admit(pool, 2) == [True]
    assert admit(pool, 3) == [True]
    assert admit(pool, 4, running=(3,)) == [True]
    assert resident(pool) == {1, 3, 4}


def test_an_idle_adapter_moves_to_where_the_pins_are() -> None:
    pool = make(a1=16, a2=8, a3=8)
    admit(pool, 1, 2)
    admit(pool, 2)
    pool.begin_step({})
    pool.evict(1)
    pool.pin(3)
    pool.take_orders()
    pool.pin(2)
    assert pool.take_orders() == (Drop(2), Load(2, 8))


def test_an_adapter_in_use_is_pinned_where_it_lies_or_not_at_all() -> None:
    pool = make(slabs=3, slab_rows=24, a1=24, a2=8, a3=8, a4=24)
    admit(pool, 1, 2, 4)
    pool.begin_step({"r": 2})
    pool.evict(1)
    pool.pin(3)
    pool.take_orders()
    pool.pin(2)
    assert pool.take_orders() == ()
    admit(pool, 4)
    with pytest.raises(Unavailable):
        pool.pin(4)
    assert resident(pool) == {2, 3, 4}


def test_a_pin_without_room_is_loaded_by_a_later_step() -> None:
    pool = make(a1=16, a2=16, a3=8, a4=8)
    admit(pool, 1, 2)
    pool.take_orders()
    pool.pin(3)
    assert pool.take_orders() == ()
    with pytest.raises(Unavailable):
        pool.pin(4)
    pool.begin_step({"r": 1})
    assert pool.take_orders() == (Drop(2), Load(3, 16))
    pool.pin(4)


def test_a_waiting_pin_joins_the_other_pins() -> None:
    pool = make(slabs=3, a1=8, a2=8, a3=16, a4=16, a5=8)
    pool.pin(1)
    admit(pool, 3, 4, 2)
    pool.pin(5)
    pool.take_orders()
    pool.begin_step({})
    assert pool.take_orders() == (Drop(2), Load(5, 8))


def test_unpinning_makes_room_within_the_step() -> None:
    pool = make(a1=16, a2=16, a3=16)
    pool.pin(1)
    assert admit(pool, 2, 3) == [True, False]
    pool.unpin(1)
    assert pool.try_admit(3)


def test_a_waiting_pin_is_loaded_for_its_own_request() -> None:
    pool = make(a1=16, a2=16, a3=8)
    pool.acquire("r", 1)
    admit(pool, 1, 2)
    pool.pin(3)
    assert not pool.try_admit(3)
    pool.release("r")
    assert pool.try_admit(3)


def test_a_waiting_pin_can_be_taken_back() -> None:
    pool = make(a1=16, a2=16, a3=8)
    admit(pool, 1, 2)
    pool.pin(3)
    pool.unpin(3)
    pool.begin_step({})
    assert 3 not in resident(pool)


def test_only_ready_versions_can_be_pinned() -> None:
    pool = make()
    with pytest.raises(AdapterNotFound):
        pool.pin(1)
    want(pool, 1)
    with pytest.raises(Unavailable) as error:
        pool.pin(1)
    assert code_of(error) is Code.NOT_READY


def test_evict_takes_it_off_the_device_and_out_of_the_host_cache() -> None:
    pool = make(a1=8)
    admit(pool, 1)
    pool.begin_step({})
    pool.take_orders()
    assert pool.evict(1)
    assert pool.take_orders() == (Drop(1), Forget(1))
    assert not pool.evict(1)
    assert not pool.evict(99)
    assert pool.snapshot()["counters"]["evictions"]["operator"] == 1


@pytest.mark.parametrize(("guard", "code"), [("request", Code.IN_USE), ("pin", Code.PINNED)])
def test_evict_is_refused_while_it_matters(guard: str, code: Code) -> None:
    pool = make(a1=8)
    match guard:
        case "request":
            pool.acquire("r", 1)
        case "pin":
            pool.pin(1)
    with pytest.raises(AdapterBusy) as error:
        pool.evict(1)
    assert code_of(error) is code


def test_evict_ends_a_lease() -> None:
    pool = make(a1=8)
    pool.hold(1, 5)
    assert pool.evict(1)
    stage(pool, 1)
    pool.retire(1)
    assert pool.get(1) is None


def test_a_retired_version_leaves_with_its_last_request_and_lease() -> None:
    clock = Clock()
    pool = AdapterPool(2, 8, 100, clock)
    stage(pool, 1)
    pool.pin(1)
    pool.acquire("r", 1)
    pool.hold(1, 5)
    pool.retire(1)
    assert admit(pool, 1) == [True]
    pool.take_orders()
    pool.release("r")
    assert pool.take_orders() == ()
    clock.now += 6
    assert pool.has_orders
    assert pool.take_orders() == (Drop(1), Forget(1))
    assert pool.get(1) is None


def test_a_lease_outlasts_requests_and_retirement() -> None:
    """A response of several engine requests; two API servers have one each."""
    clock = Clock()
    pool = AdapterPool(1, 8, 10, clock)
    stage(pool, 1)
    assert pool.lease("one", 1, 30)
    assert pool.lease("two", 1, 30)
    pool.acquire("r", 1)
    pool.retire(1)
    pool.release("r")
    assert not want(pool, 2)
    with pytest.raises(AdapterBusy):
        pool.evict(1)
    assert pool.lease("one", 1, 0)
    assert ready(pool) == {1}
    pool.lease("two", 1, 0)
    assert pool.get(1) is None
    assert not pool.lease("two", 1, 30)


def test_a_dead_api_servers_lease_runs_out() -> None:
    clock = Clock()
    pool = AdapterPool(1, 8, 10, clock)
    stage(pool, 1)
    pool.lease("dead", 1, 30)
    clock.now += 20
    pool.lease("alive", 1, 30)
    pool.retire(1)
    clock.now += 20
    assert not pool.has_orders
    clock.now += 20
    assert pool.take_orders() == (Forget(1),)


def test_a_late_request_does_not_bring_a_retired_version_back() -> None:
    pool = make(a1=8)
    pool.acquire("r1", 1)
    pool.retire(1)
    assert not pool.want(1, "a1", f"{1:064x}", "/adapters/a1", 10, served=False)
    pool.acquire("r2", 1)
    pool.release("r1")
    pool.release("r2")
    assert pool.get(1) is None


def test_a_drained_adapters_requests_overstay_after_its_time() -> None:
    clock = Clock()
    pool = AdapterPool(2, 8, 100, clock)
    stage(pool, 1)
    stage(pool, 2)
    for request, adapter_id in (("r1", 1), ("r2", 1), ("other", 2)):
        pool.acquire(request, adapter_id)
    pool.drain("a1", 5)
    assert pool.overstayed() == {}
    clock.now += 5
    assert pool.overstayed() == {"r1": "a1", "r2": "a1"}
    pool.release("r1")
    pool.release("r2")
    assert (pool.overstayed(), pool.get(1)) == ({}, None)


def test_a_drained_adapter_that_is_served_again_is_not_ended() -> None:
    pool = make(a1=8)
    pool.acquire("r", 1)
    pool.drain("a1", 0)
    assert pool.overstayed()
    assert not want(pool, 1)
    assert pool.overstayed() == {}


def test_a_retired_version_that_is_idle_leaves_at_once() -> None:
    pool = make(a1=8)
    pool.retire(1)
    pool.retire(99)
    assert pool.take_orders() == (Forget(1),)


def test_a_retired_pin_frees_its_slab() -> None:
    pool = make(a1=8, a2=16)
    pool.pin(1)
    pool.acquire("r", 1)
    pool.retire(1)
    pool.pin(2)
    pool.release("r")
    assert pool.get(1) is None


def test_a_retired_version_that_is_wanted_again_stays() -> None:
    pool = make(a1=8)
    pool.acquire("r", 1)
    pool.retire(1)
    assert not want(pool, 1)
    pool.release("r")
    assert ready(pool) == {1}


def test_after_a_reset_those_in_use_and_pins_are_loaded_where_they_were() -> None:
    pool = make(slabs=3, a1=8, a2=8, a3=16, a4=16)
    pool.pin(3)
    admit(pool, 1, 4)
    admit(pool, 2, running=(4,))
    pool.evict(1)
    before = {e["id"]: e["first_row"] for slab in pool.snapshot()["extents"] for e in slab}
    pool.reset_device()
    orders = pool.take_orders()
    assert orders[0] == Forget(1)
    loads = {order.adapter_id: order.first_row for order in orders if isinstance(order, Load)}
    assert loads == {int(key): row for key, row in before.items()}
    pool.begin_step({})
    pool.reset_device()
    assert resident(pool) == {3}
    assert pool.take_orders() == (Load(3, before["3"]),)
    assert admit(pool, 2) == [True]


def test_the_snapshot_is_plain_and_whole() -> None:
    clock = Clock()
    pool = AdapterPool(2, 16, 100, clock)
    big = 2**61 + 1
    stage(pool, big, 5)
    pool.acquire("r", big)
    pool.pin(big)
    clock.now += 7
    snapshot = pool.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert (snapshot["rows_total"], snapshot["rows_free"]) == (32, 24)
    assert (snapshot["host_bytes"], snapshot["host_budget"]) == (10, 100)
    (extent,), _ = snapshot["extents"]
    assert extent == {
        "id": str(big),
        "name": f"a{big}",
        "version": f"{big:064x}"[:12],
        "first_row": 0,
        "rows": 8,
        "pinned": True,
        "refs": 1,
    }
    (adapter,) = snapshot["adapters"]
    assert adapter["last_used_seconds_ago"] == 7
    assert (adapter["host"], adapter["resident"], adapter["loads"]) == ("ready", True, 1)
    assert pool.versions(f"a{big}") == [adapter]
    assert pool.versions("a") == []


def test_orders_can_be_sent() -> None:
    orders: Orders = (Load(2**61, 8), Drop(1), Forget(1))
    assert pickle.loads(pickle.dumps(orders)) == orders


def test_thousands_of_adapters_are_kept_like_a_plain_lru() -> None:
    """Equal adapters, one request at a time: host and device are the last so many used."""
    device_room, host_room = 64, 500
    pool = AdapterPool(8, 64, host_room * 10, Clock())
    used: OrderedDict[int, None] = OrderedDict()
    random = Random(7)
    for number in range(8_000):
        adapter_id = number if number % 4 else random.randrange(600)
        if want(pool, adapter_id):
            assert pool.staged(adapter_id, 8, 10)
        pool.acquire(str(number), adapter_id)
        assert admit(pool, adapter_id) == [True]
        pool.release(str(number))
        used[adapter_id] = None
        used.move_to_end(adapter_id)
    order = list(used)
    assert len(order) > 5000
    assert ready(pool) == set(order[-host_room:])
    assert resident(pool) == set(order[-device_room:])
