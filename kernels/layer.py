"""Where the adapters of one layer lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """The arena of one layer; an adapter of rank r owns r consecutive rows, the same ones in every layer.

    Rows of a layer that the adapter does not target, or beyond its own rank there, are zero. Every
    element is finite at all times: rows of other adapters are multiplied too, and masked afterwards.

    Attributes:
        a: [rows, slices, in], contiguous; for an embedding `in` is the vocabulary.
        b: per slice [rows, out], contiguous; B transposed, with the scale folded in.
        kind: "linear" (an lm_head too), or "embedding" (one slice).
    """

    a: Tensor
    b: tuple[Tensor, ...]
    kind: Literal["linear", "embedding"] = "linear"

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
        return self.a.shape[2]

    @property
    def widths(self) -> list[int]:
        """The output width of each slice."""
        return [b.shape[1] for b in self.b]
