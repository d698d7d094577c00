"""Steps and plans against a row-by-row reading of the same arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_cases import STRATEGIES, extents

from lora_plugin.kernels import Batch, available, choose
from lora_plugin.kernels.costs import DEFAULT, Costs
from lora_plugin.kernels.plan import Tile
from lora_plugin.kernels.runs import find_runs

RANKS = (8, 1, 24, 0, 64)
FIRST_ROWS, RANK_ARRAY, ARENA_ROWS = extents(RANKS, gap=8)
REQUESTS = st.lists(
    st.tuples(st.integers(-1, len(RANKS) - 1), st.integers(0, 5) | st.integers(15, 40)), max_size=40
)


def make_batch(costs: Costs = DEFAULT, adapters: int = len(RANKS), rows: int = ARENA_ROWS) -> Batch:
    return Batch(2000, 64, adapters, rows, "cpu", torch.float32, costs, "torch")


def update(batch: Batch, requests: list[tuple[int, int]]) -> None:
    adapters = np.array([adapter for adapter, _ in requests], dtype=np.int32)
    counts = np.array([count for _, count in requests], dtype=np.int32)
    batch.update(adapters, counts, FIRST_ROWS, RANK_ARRAY)


def covered(plan: tuple[Tile, ...]) -> dict[int, set[int]]:
    """The arena rows that each batch row is multiplied with, over all tiles; a row must be in one only."""
    found: dict[int, set[int]] = {}
    for tile in plan:
        rows = tile.rows.tolist() if isinstance(tile.rows, torch.Tensor) else list(range(*tile.rows))
        assert len(rows) == tile.count
        for i, row in enumerate(rows):
            dead = [False] * tile.height if tile.dead is None else tile.dead[i % len(tile.dead)].tolist()
            live = {arena for arena, off in zip(range(*tile.span), dead, strict=True) if not off}
            if tile.foreign is not None and tile.foreign[i]:
                assert not live
            else:
                assert row not in found
                found[row] = live
    return found


@given(requests=REQUESTS, costs=st.sampled_from(list(STRATEGIES.values())))
@settings(max_examples=120, deadline=None)
def test_a_plan_computes_every_adapter_row_once(requests: list[tuple[int, int]], costs: Costs) -> None:
    batch = make_batch(costs)
    update(batch, requests)
    naive = [adapter for adapter, count in requests for _ in range(count)]
    live = {adapter for adapter in naive if adapter >= 0 and RANKS[adapter]}
    assert batch.num_rows == len(naive)
    assert batch.row_adapters().tolist() == naive
    assert batch.num_adapters == len(live)
    assert batch.is_empty == (not live)
    assert covered(batch.plan) == {
        row: set(range(FIRST_ROWS[adapter], FIRST_ROWS[adapter] + RANKS[adapter]))
        for row, adapter in enumerate(naive)
        if adapter in live
    }
    assert all(tile.count * tile.height <= batch.workspace.max_cells for tile in batch.plan)


@given(requests=REQUESTS)
@settings(max_examples=60, deadline=None)
def test_runs_are_maximal(requests: list[tuple[int, int]]) -> None:
    adapters, counts = np.array(requests, dtype=np.int64).reshape(-1, 2).T
    runs = find_runs(adapters, counts, FIRST_ROWS, RANK_ARRAY)
    naive: list[list[int]] = []
    for row, adapter in enumerate(adapter for adapter, count in requests for _ in range(count)):
        if adapter < 0 or not RANKS[adapter]:
            continue
        lo = int(FIRST_ROWS[adapter])
        if naive and naive[-1][1] == row and naive[-1][2] == lo:
            naive[-1][1] = row + 1
        else:
            naive.append([row, row + 1, lo, lo + RANKS[adapter], 0])
    assert np.stack(runs).T.tolist() == naive


def test_an_unchanged_step_keeps_its_plan_and_arrays_may_be_reused() -> None:
    batch = make_batch()
    adapters, counts = np.array([0, -1, 2], np.int32), np.array([1, 1, 1], np.int32)
    batch.update(adapters, counts, FIRST_ROWS, RANK_ARRAY)
    plan = batch.plan
    batch.update(adapters.copy(), counts.copy(), FIRST_ROWS.copy(), RANK_ARRAY.copy())
    assert batch.plan is plan
    adapters[1] = 1  # in place, as a caller that reuses its buffers does
    batch.update(adapters, counts, FIRST_ROWS, RANK_ARRAY)
    assert batch.row_adapters().tolist() == [0, 1, 2]
    assert batch.plan is not plan


def test_far_apart_adapters_do_not_share_a_span() -> None:
    first_rows, ranks = np.array([0, 40000], np.int32), np.array([8, 8], np.int32)
    batch = make_batch(adapters=2, rows=40008)
    batch.update(np.array([0, 1, 0, 1]), np.array([1, 1, 1, 1]), first_rows, ranks)
    assert [tile.height for tile in batch.plan] == [8, 8]


def test_work_follows_the_live_rows() -> None:
    first_rows, ranks, rows = extents((8, 16, 32, 64) * 16)
    batch = make_batch(adapters=64, rows=rows)
    batch.update(np.arange(64), np.ones(64, np.int64), first_rows, ranks)
    cells = sum(tile.count * tile.height for tile in batch.plan)
    assert cells < 64 * int(ranks.sum()) / 3
    assert sum(tile.height for tile in batch.plan) < 1.1 * int(ranks.sum())


def test_a_long_run_needs_neither_copy_nor_mask() -> None:
    batch = make_batch()
    update(batch, [(0, 1), (-1, 1), (1, 1), (2, 600), (2, 600)])
    long = [tile for tile in batch.plan if tile.count > 100]
    assert [(tile.rows, tile.dead, tile.foreign) for tile in long] == [((3, 1203), None, None)]


@pytest.mark.parametrize(
    ("adapters", "counts", "first_rows", "ranks", "message"),
    [
        ([0] * 65, [1] * 65, [0], [8], "requests"),
        ([0, 0], [1], [0], [8], "requests"),
        ([0], [2001], [0], [8], "rows"),
        ([0, 0], [4, -1], [0], [8], "rows"),
        ([1], [1], [0], [8], "table"),
        ([-2], [1], [0], [8], "table"),
        ([0], [1], [0, 8], [8], "table"),
        ([0], [1], [ARENA_ROWS - 7], [8], "arena"),
        ([0], [1], [-8], [8], "arena"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(
    adapters: list[int], counts: list[int], first_rows: list[int], ranks: list[int], message: str
) -> None:
    arrays = [np.array(values, np.int32) for values in (adapters, counts, first_rows, ranks)]
    batch = make_batch()
    with pytest.raises(ValueError, match=message):
        batch.update(*arrays)
    assert batch.is_empty


def test_an_explicit_choice_that_cannot_be_had_is_refused() -> None:
    assert choose("auto", "cpu") == available()[0]
    assert choose("torch", "cpu") == available()[-1] == "torch"
    for wrong in ("triton", "cutlass", ""):
        with pytest.raises(ValueError, match="torch"):
            choose(wrong, "cpu")
