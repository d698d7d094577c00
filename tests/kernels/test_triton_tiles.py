"""The packed step, against sorting the rows one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_plugin.kernels.runs import RECORD, sort_by_adapter
from lora_plugin.kernels.triton.tables import MOST_ROWS
from lora_plugin.kernels.triton.tiles import DeviceTiles

CPU = torch.device("cpu")
FIRST_ROWS, RANKS = np.array([64, 0, 8, 40]), np.array([16, 8, 24, 0])
AFFINE = np.array([1, 0, 1, 0])
REQUESTS = st.lists(st.tuples(st.integers(-1, 3), st.sampled_from([0, 1, 1, 2, 15, 16, 17, 70])), max_size=12)


Unpacked = list[tuple[int, int, int, list[int]]]
"""(first arena row, rank, whether affine, batch rows) of each live tile."""


def unpack(tiles: DeviceTiles, height: int) -> Unpacked:
    count, records = tiles.of(height)
    return [
        (first, rank, affine, tiles.rows[at : at + rows].tolist())
        for first, rank, at, rows, affine, *_ in records.view(-1, RECORD)[: count.item()].tolist()
    ]


def naive(entries: np.ndarray, height: int) -> Unpacked:
    tiles: Unpacked = []
    for adapter in sorted(set(entries.tolist()) - {-1, 3}):
        rows = np.flatnonzero(entries == adapter).tolist()
        for start in range(0, len(rows), height):
            piece = rows[start : start + height]
            tiles.append((int(FIRST_ROWS[adapter]), int(RANKS[adapter]), int(AFFINE[adapter]), piece))
    return tiles


@settings(max_examples=60, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=3))
def test_tiles_hold_each_adapter_s_rows_once(steps: list[list[tuple[int, int]]]) -> None:
    tiles = DeviceTiles(12 * 70, 4, 24, CPU)
    for requests in steps:
        adapters, counts = np.array([*requests, (-1, 0)], np.int64).T
        tiles.update(sort_by_adapter(adapters, counts, FIRST_ROWS, RANKS, AFFINE))
        entries = np.repeat(adapters, counts)
        live = int(np.isin(entries, [0, 1, 2]).sum())
        for height, most in MOST_ROWS.items():
            if live <= most:
                found = unpack(tiles, height)
                assert found == naive(entries, height)
                assert len(found) <= tiles.bound(len(entries), height)


def test_a_step_is_one_copy_to_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = DeviceTiles(64, 4, 24, CPU)
    address, copies = tiles.buffer.data_ptr(), []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **k: copies.append(k) or copy(*a, **k))
    tiles.update(sort_by_adapter(np.array([0, 1]), np.array([3, 4]), FIRST_ROWS, RANKS))
    assert copies == [{"non_blocking": True}]
    assert tiles.buffer.data_ptr() == address


@pytest.mark.parametrize(
    ("adapters", "rank", "words"), [(2, 24, "3 adapters, at most 2"), (3, 16, "rank 24")]
)
def test_steps_beyond_the_limits_are_refused(adapters: int, rank: int, words: str) -> None:
    tiles = DeviceTiles(64, adapters, rank, CPU)
    with pytest.raises(ValueError, match=words):
        tiles.update(sort_by_adapter(np.arange(3), np.ones(3, np.int64), FIRST_ROWS, RANKS))
