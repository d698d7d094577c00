"""The allocator against a plain array of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_plugin.pool import Extent, ExtentAllocator


def test_takes_the_lowest_free_rows_rounded_up() -> None:
    extents = ExtentAllocator(slabs=2, slab_rows=24)
    assert extents.allocate(5) == Extent(0, 8)
    assert extents.allocate(9) == Extent(8, 16)
    assert extents.allocate(8) == Extent(24, 8)
    extents.free(Extent(0, 8))
    assert extents.allocate(1) == Extent(0, 8)
    assert extents.taken(0) == (Extent(0, 8), Extent(8, 16))
    assert extents.rows_free == 48 - 32


def test_never_crosses_a_slab() -> None:
    extents = ExtentAllocator(slabs=2, slab_rows=16)
    assert extents.allocate(8) == Extent(0, 8)
    assert extents.allocate(16) == Extent(16, 16)
    assert extents.allocate(16) is None
    assert extents.allocate(17) is None


@pytest.mark.parametrize(
    ("first_row", "rows"), [(0, 8), (4, 8), (8, 16), (-8, 8), (32, 8), (16, 24)], ids=str
)
def test_refuses_rows_that_are_not_free_granules_of_one_slab(first_row: int, rows: int) -> None:
    extents = ExtentAllocator(slabs=2, slab_rows=16)
    extents.allocate(8)
    with pytest.raises(ValueError):
        extents.allocate_at(first_row, rows)


def test_frees_only_what_is_taken() -> None:
    with pytest.raises(ValueError):
        ExtentAllocator(1, 8).free(Extent(0, 8))


@pytest.mark.parametrize("sizes", [(0, 8, 8), (1, 0, 8), (1, 12, 8), (1, 8, 0)], ids=str)
def test_refuses_sizes_that_make_no_arena(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        ExtentAllocator(*sizes)


@given(
    slabs=st.integers(1, 4),
    granules=st.integers(1, 6),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=40),
)
def test_agrees_with_an_array_of_rows(slabs: int, granules: int, steps: list[tuple[bool, int]]) -> None:
    slab_rows = granules * 8
    extents, owner = ExtentAllocator(slabs, slab_rows), [False] * (slabs * slab_rows)
    live: list[Extent] = []
    for free, number in steps:
        if free and live:
            extent = live.pop(number % len(live))
            extents.free(extent)
            owner[extent.first_row : extent.stop] = [False] * extent.rows
        elif not free:
            rows = -(-number // 8) * 8
            starts = [
                start
                for start in range(0, len(owner), 8)
                if start % slab_rows + rows <= slab_rows and not any(owner[start : start + rows])
            ]
            expected = Extent(starts[0], rows) if starts else None
            taken = extents.allocate(number)
            assert taken == expected
            if taken is not None:
                live.append(taken)
                owner[taken.first_row : taken.stop] = [True] * taken.rows
        assert extents.rows_free == owner.count(False)
        assert sorted(live) == [extent for slab in range(slabs) for extent in extents.taken(slab)]
