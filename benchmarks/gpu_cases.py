"""What `gpu_ops` measures: the layers of two models, the steps over them, and the limit by bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice, product
from typing import NamedTuple

import torch
from torch import Tensor


class Linear(NamedTuple):
    """A fused linear layer: the width of its input and of each slice of its output."""

    inputs: int
    widths: tuple[int, ...]

    @property
    def row_elements(self) -> int:
        """Of A and B, for one rank."""
        return len(self.widths) * self.inputs + sum(self.widths)


class Model(NamedTuple):
    """One decoder layer, as one rank holds it."""

    name: str
    linears: tuple[Linear, ...]


LLAMA_8B = Model(
    "Llama-8B",
    (
        Linear(4096, (4096, 1024, 1024)),
        Linear(4096, (4096,)),
        Linear(4096, (14336, 14336)),
        Linear(14336, (4096,)),
    ),
)
LLAMA_70B_TP8 = Model(
    "Llama-70B-TP8",
    (
        Linear(8192, (1024, 128, 128)),
        Linear(1024, (8192,)),
        Linear(8192, (3584, 3584)),
        Linear(3584, (8192,)),
    ),
)
TINY = Model("tiny", (Linear(48, (32, 16, 16)), Linear(32, (48,))))
"""For the gate in the interpreter."""
MODELS = {model.name: model for model in (LLAMA_8B, LLAMA_70B_TP8, TINY)}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ADAPTERS = (1, 4, 16, 64)
RANKS = {"8": (8,), "16": (16,), "32": (32,), "64": (64,), "128": (128,), "mixed": (8, 16, 32, 64, 128)}


@dataclass(frozen=True)
class Case:
    """A step: row i uses adapter i modulo their number; ranks repeat over the adapters."""

    model: Model
    rows: int
    adapters: int
    ranks_name: str

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(islice(cycle(RANKS[self.ranks_name]), self.adapters))

    @property
    def row_adapters(self) -> list[int]:
        return [row % self.adapters for row in range(self.rows)]

    @property
    def weight_bytes(self) -> int:
        """Of all adapters at their live rank, in 2-byte elements."""
        return 2 * sum(self.ranks) * sum(linear.row_elements for linear in self.model.linears)

    @property
    def limit_bytes(self) -> int:
        """What a layer has to move at least: every A and B once, x read, y read and written."""
        activations = sum(linear.inputs + 2 * sum(linear.widths) for linear in self.model.linears)
        return self.weight_bytes + 2 * self.rows * activations


def cases(models: list[str], rows: list[int], adapters: list[int], ranks: list[str]) -> Iterator[Case]:
    """Every combination in which each adapter has a row."""
    for model, count, different, rank in product(models, rows, adapters, ranks):
        if different <= count and (rank != "mixed" or different > 1):
            yield Case(MODELS[model], count, different, rank)


@dataclass(frozen=True)
class Weights:
    """The adapters of one linear layer: per adapter A [rank, slices, in], and B per slice [rank, width]."""

    linear: Linear
    a: tuple[Tensor, ...]
    b: tuple[tuple[Tensor, ...], ...]


def random_weights(case: Case, linear: Linear, device: torch.device, dtype: torch.dtype) -> Weights:
    """Adapters whose outputs are of order one."""

    def random(rank: int, *shape: int, scale: float) -> Tensor:
        return (torch.randn(rank, *shape, device=device) * scale).to(dtype)

    a = tuple(random(r, len(linear.widths), linear.inputs, scale=linear.inputs**-0.5) for r in case.ranks)
    b = tuple(tuple(random(r, width, scale=r**-0.5) for width in linear.widths) for r in case.ranks)
    return Weights(linear, a, b)


def expected(y: Tensor, x: Tensor, case: Case, weights: Weights) -> Tensor:
    """y plus every row's adapter, in float64."""
    result = y.double()
    for adapter in range(case.adapters):
        rows = slice(adapter, None, case.adapters)
        a, bs = weights.a[adapter].double(), weights.b[adapter]
        deltas = [x[rows].double() @ a[:, i].t() @ b.double() for i, b in enumerate(bs)]
        result[rows] += torch.cat(deltas, 1)
    return result
