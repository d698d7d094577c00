"""Where adapters lie in the arena: extents of rows inside slabs.

The arena has `slabs x slab_rows` rank rows. An adapter of rank r takes r rows, rounded up to the granule,
the same ones in every layer. An extent never crosses a slab, so emptying one slab makes room for any
adapter, whatever the fragmentation.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Rows [first_row, first_row + rows) of the arena."""

    first_row: int
    rows: int

    @property
    def stop(self) -> int:
        return self.first_row + self.rows

    def overlaps(self, other: Extent) -> bool:
        return self.first_row < other.stop and other.first_row < self.stop


def round_up(value: int, granule: int) -> int:
    """The smallest positive multiple of `granule` that is not below `value`."""
    return max(granule, -(-value // granule) * granule)


class ExtentAllocator:
    """Hands out extents; knows nothing of who holds them.

    Args:
        slabs: how many slabs there are.
        slab_rows: rows of a slab, a multiple of the granule.
        granule: every extent starts and ends at a multiple of it.

    Raises:
        ValueError: the sizes are not positive, or `slab_rows` is no multiple of the granule.
    """

    def __init__(self, slabs: int, slab_rows: int, granule: int = 8) -> None:
        if slabs < 1 or granule < 1 or slab_rows < 1 or slab_rows % granule:
            raise ValueError(f"no arena of {slabs} slabs x {slab_rows} rows in granules of {granule}")
        self.slabs = slabs
        self.slab_rows = slab_rows
        self.granule = granule
        self._taken: list[list[Extent]] = [[] for _ in range(slabs)]

    @property
    def rows_total(self) -> int:
        return self.slabs * self.slab_rows

    @property
    def rows_free(self) -> int:
        return self.rows_total - sum(extent.rows for slab in self._taken for extent in slab)

    def slab_of(self, extent: Extent) -> int:
        return extent.first_row // self.slab_rows

    def taken(self, slab: int) -> tuple[Extent, ...]:
        """The extents of a slab, by address."""
        return tuple(self._taken[slab])

    def allocate(self, rows: int) -> Extent | None:
        """The free extent of the lowest address (which keeps the live span compact), or None."""
        for first_row, in_the_way in self.windows(rows):
            if not in_the_way:
                return self.allocate_at(first_row, rows)
        return None

    def allocate_at(self, first_row: int, rows: int) -> Extent:
        """Take these rows; raises ValueError if they are misaligned, cross a slab or are not free."""
        extent = Extent(first_row, round_up(rows, self.granule))
        slab, offset = divmod(first_row, self.slab_rows)
        fits = 0 <= slab < self.slabs and offset + extent.rows <= self.slab_rows
        if not fits or offset % self.granule:
            raise ValueError(f"{extent} does not lie on the granules of one slab")
        if any(map(extent.overlaps, self._taken[slab])):
            raise ValueError(f"{extent} is not free")
        insort(self._taken[slab], extent)
        return extent

    def free(self, extent: Extent) -> None:
        """Give an extent back; raises ValueError if it is not taken."""
        self._taken[self.slab_of(extent)].remove(extent)

    def in_the_way(self, wanted: Extent) -> tuple[Extent, ...]:
        """The extents that overlap rows of one slab."""
        return tuple(filter(wanted.overlaps, self._taken[self.slab_of(wanted)]))

    def windows(
        self, rows: int, slabs: Iterable[int] | None = None
    ) -> Iterator[tuple[int, tuple[Extent, ...]]]:
        """Every place worth considering for `rows` rows: its first row, and the extents in the way.

        Places start at a slab's start or right after an extent: any other has the same extents in its way
        as one of these, or more. By address within the slabs, which come in the order given (all, by
        address).
        """
        rows = round_up(rows, self.granule)
        for slab in range(self.slabs) if slabs is None else slabs:
            taken = self._taken[slab]
            start, end = slab * self.slab_rows, (slab + 1) * self.slab_rows
            for index in range(len(taken) + 1):
                if start + rows > end:
                    break
                yield start, _before(taken, index, start + rows)
                if index < len(taken):
                    start = taken[index].stop


def _before(taken: list[Extent], index: int, stop: int) -> tuple[Extent, ...]:
    """The extents from `index` on that start before row `stop`."""
    last = index
    while last < len(taken) and taken[last].first_row < stop:
        last += 1
    return tuple(taken[index:last])
