"""The cost model: what a tile takes, so that the plan can tell which runs should share one."""

from __future__ import annotations

from typing import NamedTuple

WIDE_PRODUCTS = 800_000
"""Up to so many multiplications a 16-bit product is faster in float32, casts included: oneDNN takes 20 us to
begin one, whatever its size, MKL's float32 product a few."""


class Costs(NamedTuple):
    """Microseconds in a layer of `width`, measured with AMX; only their ratios matter.

    A product has a fixed price that outweighs a lot of arithmetic; against it stand the rows of a span that
    nobody in the tile wants, and the rows of the batch that are multiplied with them for nothing.

    Attributes:
        width: elements of an arena row in a mean layer, A and B of all slices.
        wide_limit: multiplications up to which a product is done in float32.
        wide_tile, wide_element, wide_product: a float32 tile: fixed, per arena element, per multiplication.
        tile, element, product: the same for a tile in the serving dtype.
        gather: copying a tile's rows together and back.
        restore: saving a tile's rows, and putting back those that are not its own.
        copied_rows: rows of a tile that is gathered or restored, at most; bounds the buffers.
        gather_run: longer runs are computed where they lie.
    """

    width: float = 4096.0
    wide_limit: float = WIDE_PRODUCTS
    wide_tile: float = 40.0
    wide_element: float = 1.5e-4
    wide_product: float = 2e-5
    tile: float = 90.0
    element: float = 1e-4
    product: float = 2e-6
    gather: float = 12.0
    restore: float = 5.0
    copied_rows: int = 64
    gather_run: int = 16

    def of(self, rows: int, span: int) -> float:
        """A tile of so many batch rows over so many arena rows."""
        elements, products = self.width * span, self.width * span * rows
        if products / 2 <= self.wide_limit:  # half of them shrink, half expand
            return self.wide_tile + self.wide_element * elements + self.wide_product * products
        return self.tile + self.element * elements + self.product * products


DEFAULT = Costs()
