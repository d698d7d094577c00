"""Tile shapes per architecture; chosen by the rows of y, so that a captured graph keeps its choice."""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

MOST_ROWS = {1: 4, 16: 256, 64: (1 << 31) - 1}
"""Batch rows of a tile (single rows, small tiles, large ones); up to how many rows of y it may be used."""
HEIGHTS = tuple(MOST_ROWS)


class TileShape(NamedTuple):
    """One kernel's tile and its launch options.

    Attributes:
        ranks: ranks of one step (expand) or of one chunk (shrink).
        extent: elements of `in` of one step (shrink), or columns of y (expand).
    """

    ranks: int
    extent: int
    warps: int
    stages: int


class Choice(NamedTuple):
    """How a launch over a number of rows is cut.

    Attributes:
        height: batch rows of a tile, one of HEIGHTS.
        split: parts that shrink cuts `in` into, each a plane.
    """

    height: int
    split: int
    shrink: TileShape
    expand: TileShape


Table = tuple[tuple[int, Choice], ...]
"""(most rows of y, choice), ascending; the last choice holds beyond."""


CUTS = ((MOST_ROWS[1], 1, 8), (8, 16, 8), (64, 16, 4), (MOST_ROWS[16], 16, 2), (1024, 64, 4), (4096, 64, 2))
"""(most rows of y, height, split): `in` is split while there are too few programs to fill a device."""


def _table(shrink: TileShape, expand: TileShape, large_shrink: TileShape, large_expand: TileShape) -> Table:
    """The same cuts with an architecture's shapes for small tiles (and single rows) and for large ones."""
    shapes = {1: (shrink, expand), 16: (shrink, expand), 64: (large_shrink, large_expand)}
    cuts = (*CUTS, (MOST_ROWS[64], 64, 1))
    return tuple((rows, Choice(height, split, *shapes[height])) for rows, height, split in cuts)


OTHER = "other"
"""The key for an architecture without a table: fits 48 KB of shared memory in any dtype."""
TABLES: dict[str, Table] = {
    "sm_80": _table(
        TileShape(16, 256, 4, 3), TileShape(16, 128, 4, 2), TileShape(64, 64, 4, 3), TileShape(16, 128, 8, 2)
    ),
    "sm_90": _table(
        TileShape(16, 256, 4, 3), TileShape(16, 128, 4, 2), TileShape(64, 64, 4, 4), TileShape(32, 128, 4, 2)
    ),
    "sm_100": _table(
        TileShape(16, 256, 4, 3), TileShape(16, 128, 4, 2), TileShape(64, 64, 4, 4), TileShape(32, 128, 4, 2)
    ),
    "gfx942": _table(
        TileShape(16, 256, 4, 2), TileShape(16, 128, 4, 2), TileShape(64, 64, 4, 2), TileShape(32, 128, 4, 2)
    ),
    OTHER: _table(
        TileShape(16, 128, 4, 2), TileShape(16, 64, 4, 2), TileShape(64, 32, 4, 2), TileShape(32, 64, 4, 2)
    ),
}


def architecture(device: torch.device) -> str:
    """The table's key for a device, from its major compute capability or the name of an AMD one."""
    if torch.version.hip:
        return key_of(str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0])
    return key_of(f"sm_{torch.cuda.get_device_capability(device)[0]}0")


@cache
def key_of(name: str) -> str:
    """`name` where there is a table for it, else `OTHER`, which is said once."""
    if name in TABLES:
        return name
    logger.warning("no tile shapes for %s: the kernels use those that fit any device", name)
    return OTHER


def choose_shape(arch: str, rows: int, dtype: torch.dtype) -> Choice:
    """The entry for a launch over `rows` rows of y; 4-byte elements take half the extent."""
    choice = next(choice for most, choice in TABLES[arch] if rows <= most)
    if dtype.itemsize < 4:
        return choice
    return choice._replace(
        shrink=choice.shrink._replace(extent=choice.shrink.extent // 2),
        expand=choice.expand._replace(extent=choice.expand.extent // 2),
    )
