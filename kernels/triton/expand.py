"""Expand: the planes of shrink, summed, times each adapter's B, added into the base output."""

from __future__ import annotations

import triton
import triton.language as tl

from lora_plugin.kernels.triton.shrink import add_product, is_affine, point_at_rows, read_tile


@triton.jit
def find_block(
    slices: tl.tensor, block: tl.tensor, SLICES: tl.constexpr, COLS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The slice that a column block lies in, and its first column there."""
    piece = block * 0
    before = block * 0
    blocks = block * 0
    for i in tl.static_range(SLICES):
        inside = block >= blocks
        piece = tl.where(inside, i, piece)
        before = tl.where(inside, blocks, before)
        blocks += (tl.load(slices + 3 * i + 1).to(tl.int32) + COLS - 1) // COLS
    return piece, (block - before) * COLS


@triton.jit
def expand(
    y: tl.tensor,
    planes: tl.tensor,
    slices: tl.tensor,
    count: tl.tensor,
    records: tl.tensor,
    rows: tl.tensor,
    y_stride: tl.tensor,
    plane_size: tl.tensor,
    pitch: tl.tensor,
    SPLIT: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    RANKS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """y[row, slice's columns] += sum over parts of planes[part, slice, position] . B of the slice [first:].

    With an affine adapter the sum is then scaled by 1 + gain and shifted, in float32.

    Grid: tiles, column blocks of all slices. Rows outside of tiles are not touched.

    Args:
        y: [rows, out] of any row stride. planes: as `shrink` leaves them.
        slices: int64 [slices, 3]: address of B [arena rows, width], width, first column in y.
        count, records, rows: see `DeviceTiles`.
        ALIGNED: addresses, widths and first columns are multiples of 16.
    """
    first_row, rank, position, height = read_tile(count, records, tl.program_id(0))
    piece, column = find_block(slices, tl.program_id(1), SLICES, COLS)
    address = tl.load(slices + 3 * piece)
    width = tl.load(slices + 3 * piece + 1).to(tl.int32)
    first_column = tl.load(slices + 3 * piece + 2).to(tl.int32)
    b = address.to(tl.pointer_type(y.dtype.element_ty))
    if ALIGNED:
        b = tl.multiple_of(b, 16)
        width = tl.multiple_of(width, 16)
        first_column = tl.multiple_of(first_column, 16)
    m, r, n = tl.arange(0, ROWS), tl.arange(0, RANKS), column + tl.arange(0, COLS)
    in_tile = (m < height)[:, None]
    in_slice = (n < width)[None, :]
    b_tile = b + first_row.to(tl.int64) * width
    shrunk = planes + piece.to(tl.int64) * plane_size + position.to(tl.int64) * pitch
    columns = (first_column + n)[None, :]
    mask = in_tile & in_slice
    if ROWS <= 16:  # early, beside the loads of the loop: a large tile has no registers for it
        out = point_at_rows(y, y_stride, rows + position, height, ROWS) + columns
        base = tl.load(out, mask=mask, other=0.0)
    total = tl.full((ROWS, COLS), 0.0, tl.float32)
    for start in tl.range(0, rank, RANKS):
        ranks = start + r
        cells = shrunk + m[:, None] * pitch + ranks[None, :]
        written = in_tile & (ranks < (rank + 15) // 16 * 16)[None, :]
        s = tl.load(cells, mask=written, other=0.0)
        for part in tl.static_range(1, SPLIT):
            s += tl.load(cells + part * SLICES * plane_size, mask=written, other=0.0)
        b_mask = (ranks < rank)[:, None] & in_slice
        b_part = tl.load(b_tile + ranks[:, None] * width + n[None, :], mask=b_mask, other=0.0)
        total = add_product(total, s.to(b_part.dtype), b_part)
    if ROWS > 16:
        out = point_at_rows(y, y_stride, rows + position, height, ROWS) + columns
        base = tl.load(out, mask=mask, other=0.0)
    total += base.to(tl.float32)
    if is_affine(count, records, tl.program_id(0)):
        gain = tl.load(b_tile + rank * width + n, mask=n < width, other=0.0).to(tl.float32)
        shift = tl.load(b_tile + (rank + 1) * width + n, mask=n < width, other=0.0).to(tl.float32)
        total += total * gain[None, :] + shift[None, :]
    tl.store(out, total.to(base.dtype), mask=mask)
