"""Where the adapters of one layer lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from torch import Tensor

Kind = Literal["linear", "embedding"]
AFFINE_ROWS = 2
"""Rows of B after an adapter's rank rows that scale and shift its outputs: the gain, and the shift."""


class Shape(NamedTuple):
    """What layers have in common that can be computed alike."""

    kind: Kind
    in_features: int
    widths: tuple[int, ...]

    @property
    def slices(self) -> int:
        return len(self.widths)


@dataclass(frozen=True)
class LayerWeights:
    """The arena of one layer; an adapter of rank r owns r consecutive rows, the same ones in every layer.

    Rows of a layer that the adapter does not target, or beyond its rank there, are zero. An affine adapter
    owns two more: y becomes (y + x A^T B) (1 + gain) + shift, with gain and shift in these rows of B. Every
    element is finite at all times: rows of other adapters are multiplied too, and masked afterwards.

    Attributes:
        a: [rows, slices, in], contiguous; for an embedding `in` is the vocabulary.
        b: per slice [rows, out], contiguous; B transposed, with the scale folded in.
        kind: "linear" (an lm_head too), or "embedding" (one slice).
    """

    a: Tensor
    b: tuple[Tensor, ...]
    kind: Kind = "linear"

    def __post_init__(self) -> None:
        if self.a.dim() != 3 or self.a.shape[1] != len(self.b) or not self.a.is_contiguous():
            raise ValueError(f"a must be contiguous [rows, {len(self.b)}, in], not {tuple(self.a.shape)}")
        for b in self.b:
            if b.dim() != 2 or b.shape[0] != self.rows or not b.is_contiguous():
                raise ValueError(f"b must be contiguous [{self.rows}, out], not {tuple(b.shape)}")
            if b.dtype != self.a.dtype or b.device != self.a.device:
                raise ValueError("a and b must share dtype and device")
        if self.kind == "embedding" and len(self.b) != 1:
            raise ValueError("an embedding has one slice")

    @property
    def rows(self) -> int:
        return self.a.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape.in_features

    @property
    def widths(self) -> tuple[int, ...]:
        """The output width of each slice."""
        return self.shape.widths

    @cached_property
    def shape(self) -> Shape:
        return Shape(self.kind, self.a.shape[2], tuple(b.shape[1] for b in self.b))

    def span(self, lo: int, hi: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Views of the arena rows [lo, hi): A [rows * slices, in], and each slice's B [rows, out]."""
        return self.a[lo:hi].flatten(0, 1), tuple(b[lo:hi] for b in self.b)
