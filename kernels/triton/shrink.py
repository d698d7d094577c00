"""Shrink: each tile's rows times its adapter's A, into float32 planes.

A cell of a plane belongs to a position in the sorted rows and a rank. Whole chunks of 16 ranks are written
(zeros past the rank), so that the loads of expand stay vectors. Programs of dead tiles see rank 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_tile(count: tl.tensor, records: tl.tensor, index: tl.tensor) -> tuple[tl.tensor, ...]:
    """First arena row, rank, first position and rows of a tile; zeros past the live ones."""
    live = index < tl.load(count)
    record = records + index * 8
    first_row = tl.load(record, mask=live, other=0)
    rank = tl.load(record + 1, mask=live, other=0)
    position = tl.load(record + 2, mask=live, other=0)
    height = tl.load(record + 3, mask=live, other=0)
    return first_row, rank, position, height


@triton.jit
def is_affine(count: tl.tensor, records: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Whether a gain and a shift follow the rank rows of a tile's adapter; false past the live ones."""
    return tl.load(records + index * 8 + 4, mask=index < tl.load(count), other=0) != 0


@triton.jit
def point_at_rows(
    base: tl.tensor, stride: tl.tensor, rows: tl.tensor, height: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    """[ROWS, 1] where a tile's rows begin; the first row of all past its height."""
    m = tl.arange(0, ROWS)
    row = tl.load(rows + m, mask=m < height, other=0)
    return base + row.to(tl.int64)[:, None] * stride


@triton.jit
def add_product(total: tl.tensor, left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """total + left . right; of a single row without the matrix unit, which takes no fewer than 16."""
    if left.shape[0] == 1:
        total += tl.sum(left.to(tl.float32) * tl.trans(right).to(tl.float32), axis=1)[None, :]
    else:
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def shrink(
    x: tl.tensor,
    a: tl.tensor,
    planes: tl.tensor,
    count: tl.tensor,
    records: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    a_stride: tl.tensor,
    in_features: tl.tensor,
    plane_size: tl.tensor,
    pitch: tl.tensor,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """planes[part, slice, position, rank] = x[row, part of in] . a[first + rank, slice, part of in].

    Grid: tiles, parts of `in` (SPLIT, at most its steps), slices. Every part writes its own plane: the sum in
    expand has one order, and nothing is cleared before.

    Args:
        x: [rows, in] of any row stride. a: [arena rows, slices, in].
        planes: float32, `pitch` cells a position.
        count, records, rows: see `DeviceTiles`.
        EVEN: `in` is a multiple of DEPTH.
    """
    part, piece = tl.program_id(1), tl.program_id(2)
    first_row, rank, position, height = read_tile(count, records, tl.program_id(0))
    m, r, d = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, DEPTH)
    in_tile = (m < height)[:, None]
    x_tile = point_at_rows(x, x_stride, rows + position, height, ROWS)
    a_tile = a + first_row.to(tl.int64) * a_stride + piece * in_features
    plane = part * tl.num_programs(2) + piece
    out = planes + plane.to(tl.int64) * plane_size + position.to(tl.int64) * pitch
    steps = (in_features + DEPTH - 1) // DEPTH
    begin = part * steps // SPLIT * DEPTH
    end = tl.minimum((part + 1) * steps // SPLIT * DEPTH, in_features)
    chunks = (rank + RANKS - 1) // RANKS
    # Flattened, the loop carries pointers, whose alignment AMD's compiler forgets where there is no dot.
    for chunk in tl.range(0, chunks, flatten=ROWS > 1):
        ranks = chunk * RANKS + r
        total = tl.full((ROWS, RANKS), 0.0, tl.float32)
        for k in tl.range(begin, end, DEPTH):
            if EVEN:
                x_mask, a_mask = in_tile, (ranks < rank)[None, :]
            else:
                x_mask = in_tile & (k + d < in_features)[None, :]
                a_mask = (ranks < rank)[None, :] & (k + d < in_features)[:, None]
            x_part = tl.load(x_tile + (k + d)[None, :], mask=x_mask, other=0.0)
            a_part = tl.load(a_tile + ranks[None, :] * a_stride + (k + d)[:, None], mask=a_mask, other=0.0)
            total = add_product(total, x_part, a_part)
        written = (ranks < (rank + 15) // 16 * 16)[None, :]
        tl.store(out + m[:, None] * pitch + ranks[None, :], total, mask=in_tile & written)


@triton.jit
def embed(
    ids: tl.tensor,
    a: tl.tensor,
    planes: tl.tensor,
    count: tl.tensor,
    records: tl.tensor,
    rows: tl.tensor,
    vocabulary: tl.tensor,
    pitch: tl.tensor,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """planes[position, rank] = a[first + rank, ids[row]]: shrink for an embedding. Grid: tiles.

    Args:
        ids: [rows] contiguous int32 or int64. a: [arena rows, vocabulary]. The others as for `shrink`.
    """
    first_row, rank, position, height = read_tile(count, records, tl.program_id(0))
    m, r = tl.arange(0, ROWS), tl.arange(0, RANKS)
    in_tile = m < height
    row = tl.load(rows + position + m, mask=in_tile, other=0)
    token = tl.load(ids + row, mask=in_tile, other=0).to(tl.int32)
    a_tile = a + first_row.to(tl.int64) * vocabulary
    out = planes + position.to(tl.int64) * pitch
    for start in tl.range(0, rank, RANKS):
        ranks = start + r
        mask = in_tile[:, None] & (ranks < rank)[None, :]
        picked = tl.load(a_tile + ranks[None, :] * vocabulary + token[:, None], mask=mask, other=0.0)
        written = (ranks < (rank + 15) // 16 * 16)[None, :]
        cells = out + m[:, None] * pitch + ranks[None, :]
        tl.store(cells, picked.to(tl.float32), mask=in_tile[:, None] & written)
