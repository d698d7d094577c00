"""What adapters add to a step on the CPU: every linear layer of a model, with and without the op.

    python benchmarks/cpu_ops.py [--threads 2] [--json FILE]

Weights of all layers are distinct, so nothing stays in the cache that would not in a server. Each case is
checked against the float64 reference before it is timed. A time is the sum over the calls of a step of each
call's best round; with one thread it is processor time, which other load disturbs less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lora_plugin.kernels import reference
from torch import Tensor

from lora_plugin import kernels

Clock = Callable[[], float]
ARENA_ROWS = 2048
ROW = "{model:14} {case:42} {tiles:5} {base_ms:9.2f} {lora_ms:9.2f} {ratio:6.2f}"
HEAD = f"{'model':14} {'step':42} {'tiles':>5} {'base ms':>9} {'lora ms':>9} {'ratio':>6}"


@dataclass(frozen=True)
class Model:
    """The linear layers that a decoder layer has: (in, out of each slice)."""

    name: str
    layers: int
    linears: tuple[tuple[int, tuple[int, ...]], ...]


SMOL = Model("SmolLM2-135M", 30, ((576, (576, 192, 192)), (576, (576,)), (576, (1536, 1536)), (1536, (576,))))
WIDE = Model(
    "hidden 2048", 4, ((2048, (2048, 512, 512)), (2048, (2048,)), (2048, (8192, 8192)), (8192, (2048,)))
)


@dataclass(frozen=True)
class Case:
    """A step: requests as (adapter, rows); adapter i has rank `ranks[i]`, -1 is the base model."""

    name: str
    model: Model
    ranks: tuple[int, ...]
    requests: tuple[tuple[int, int], ...]


MIXED = tuple((adapter, 1) for adapter in (-1, 0, 1, 2, -1, 0, 1, 2))
MIXED_PREFILL = tuple((adapter, 200) for adapter, _ in MIXED)
CASES = (
    Case("base only, 8 rows", SMOL, (8, 16, 32), ((-1, 8),)),
    Case("decode, base and 3 adapters, 8 rows", SMOL, (8, 16, 32), MIXED),
    Case("decode, 1 adapter, 1 row", SMOL, (16,), ((0, 1),)),
    Case("decode, 64 adapters, 64 rows", SMOL, (8, 16, 32, 64) * 16, tuple((i, 1) for i in range(64))),
    Case("16 adapters, 16 rows each", SMOL, (16,) * 16, tuple((i, 16) for i in range(16))),
    Case("prefill, 1 adapter, 1600 rows", SMOL, (16,), ((0, 200),) * 8),
    Case("prefill, base and 3 adapters, 1600 rows", SMOL, (8, 16, 32), MIXED_PREFILL),
    Case("prefill of 512 beside mixed decode", SMOL, (8, 16, 32), (*MIXED, (1, 512))),
    Case("decode, base and 3 adapters, 8 rows", WIDE, (8, 16, 32), MIXED),
    Case("prefill, 1 adapter, 512 rows", WIDE, (16,), ((0, 512),)),
)


@dataclass
class Layer:
    base: Tensor
    weights: kernels.LayerWeights
    handle: int


def make_layers(model: Model, batch: kernels.Batch, used_rows: int) -> list[Layer]:
    return [make_layer(*linear, batch, used_rows) for _ in range(model.layers) for linear in model.linears]


def make_layer(inputs: int, outputs: tuple[int, ...], batch: kernels.Batch, used_rows: int) -> Layer:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape).mul_(shape[-1] ** -0.5).to(batch.dtype)

    a = torch.zeros(ARENA_ROWS, len(outputs), inputs, dtype=batch.dtype)
    a[:used_rows] = random(used_rows, len(outputs), inputs)
    bs = tuple(torch.zeros(ARENA_ROWS, width, dtype=batch.dtype) for width in outputs)
    for b in bs:
        b[:used_rows] = random(used_rows, b.shape[1])
    weights = kernels.LayerWeights(a, bs)
    return Layer(random(sum(outputs), inputs), weights, kernels.register(weights, batch))


def check(layers: list[Layer], inputs: dict[int, Tensor], rows: list[tuple[int, int] | None]) -> None:
    """The gate: no time is taken of a wrong result."""
    for layer in layers:
        x = inputs[layer.base.shape[1]]
        y = torch.nn.functional.linear(x, layer.base)
        expected = reference.lora_apply(y, x, layer.weights, rows)
        torch.ops.lora_plugin.lora_apply(y, x, layer.handle)
        torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)


def measure(case: Case, rounds: int, clock: Clock) -> dict[str, Any]:
    """Checks and times one case."""
    kernels.unregister_all()
    counts = np.array([rows for _, rows in case.requests])
    adapters = np.array([adapter for adapter, _ in case.requests])
    ranks = np.array(case.ranks, dtype=np.int32)
    first_rows = (np.cumsum((ranks + 7) // 8 * 8) - (ranks + 7) // 8 * 8).astype(np.int32)
    batch = kernels.Batch(int(counts.sum()), len(counts), len(ranks), ARENA_ROWS, "cpu", torch.bfloat16)
    layers = make_layers(case.model, batch, int(first_rows[-1] + ranks[-1]))
    batch.update(adapters, counts, first_rows, ranks)
    inputs = {size: torch.randn(int(counts.sum()), size).to(batch.dtype) for size, _ in case.model.linears}
    extents = list(zip(first_rows.tolist(), (first_rows + ranks).tolist(), strict=True))
    rows = [extents[adapter] if adapter >= 0 else None for adapter in batch.row_adapters()]
    check(layers[: len(case.model.linears)], inputs, rows)
    found = {"case": case.name, "model": case.model.name, "tiles": len(batch.plan)}
    return found | times(layers, inputs, rounds, clock)


def times(layers: list[Layer], inputs: dict[int, Tensor], rounds: int, clock: Clock) -> dict[str, float]:
    """Milliseconds of a step's base products, of the ops after them, and their ratio."""
    seconds = np.array([step(layers, inputs, clock) for _ in range(rounds)])
    base, lora = seconds.min(axis=0).sum(axis=0) * 1e3
    return {"base_ms": base, "lora_ms": lora, "ratio": lora / base}


def step(layers: list[Layer], inputs: dict[int, Tensor], clock: Clock) -> list[tuple[float, float]]:
    """Seconds of each layer's base product and op."""
    apply, linear = torch.ops.lora_plugin.lora_apply.default, torch.nn.functional.linear
    spent = []
    for layer in layers:
        x = inputs[layer.base.shape[1]]
        begin = clock()
        y = linear(x, layer.base)
        between = clock()
        apply(y, x, layer.handle)
        spent.append((between - begin, clock() - between))
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    results = []
    print(HEAD)
    with torch.inference_mode():
        for case in CASES:
            result = measure(case, options.rounds, clock)
            print(ROW.format(**result), flush=True)
            results.append(result)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
