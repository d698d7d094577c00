"""What adapters add to a step on the CPU: every linear layer of a model, with and without the op.

    python benchmarks/cpu_ops.py [--kernels native torch] [--threads 1] [--case TEXT] [--json FILE]

Weights of all layers are distinct, so nothing stays in the cache that would not in a server. Each case is
checked against the float64 reference before it is timed. A time is the sum over the calls of a step of each
call's median round; with one thread it is processor time, which other load disturbs less.
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
from torch import Tensor

from lora_plugin import kernels
from lora_plugin.kernels import reference

Clock = Callable[[], float]
ARENA_ROWS = 2048
ROW = "{model:14} {case:42} {base_ms:9.2f}"
HEAD = f"{'model':14} {'step':42} {'base ms':>9}"
COLUMNS = " {ms:9.2f} {ratio:6.2f}"


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
    Case("decode, 16 adapters, 16 rows", SMOL, (8, 16, 32) * 5 + (8,), tuple((i, 1) for i in range(16))),
    Case("decode, 64 adapters, 64 rows", SMOL, (8, 16, 32, 64) * 16, tuple((i, 1) for i in range(64))),
    Case("16 adapters, 16 rows each", SMOL, (16,) * 16, tuple((i, 16) for i in range(16))),
    Case("prefill, 1 adapter, 1600 rows", SMOL, (16,), ((0, 200),) * 8),
    Case("prefill, base and 3 adapters, 1600 rows", SMOL, (8, 16, 32), MIXED_PREFILL),
    Case("prefill of 512 beside mixed decode", SMOL, (8, 16, 32), (*MIXED, (1, 512))),
    Case("decode, base and 3 adapters, 8 rows", WIDE, (8, 16, 32), MIXED),
    Case("decode, 16 adapters, 16 rows", WIDE, (8, 16, 32) * 5 + (8,), tuple((i, 1) for i in range(16))),
    Case("prefill, 1 adapter, 512 rows", WIDE, (16,), ((0, 512),)),
)


@dataclass
class Layer:
    base: Tensor
    weights: kernels.LayerWeights
    handles: list[int]


def make_layers(model: Model, batches: list[kernels.Batch], used_rows: int) -> list[Layer]:
    return [make_layer(*linear, batches, used_rows) for _ in range(model.layers) for linear in model.linears]


def make_layer(inputs: int, outputs: tuple[int, ...], batches: list[kernels.Batch], used_rows: int) -> Layer:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape).mul_(shape[-1] ** -0.5).bfloat16()

    a = torch.zeros(ARENA_ROWS, len(outputs), inputs, dtype=torch.bfloat16)
    a[:used_rows] = random(used_rows, len(outputs), inputs)
    bs = tuple(torch.zeros(ARENA_ROWS, width, dtype=torch.bfloat16) for width in outputs)
    for b in bs:
        b[:used_rows] = random(used_rows, b.shape[1])
    weights = kernels.LayerWeights(a, bs)
    return Layer(
        random(sum(outputs), inputs), weights, [kernels.register(weights, batch) for batch in batches]
    )


def check(layers: list[Layer], inputs: dict[int, Tensor], rows: list[tuple[int, int] | None]) -> None:
    """The gate: no time is taken of a wrong result."""
    for layer in layers:
        x = inputs[layer.base.shape[1]]
        y = torch.nn.functional.linear(x, layer.base)
        expected = reference.lora_apply(y, x, layer.weights, rows)
        for handle in layer.handles:
            result = y.clone()
            torch.ops.lora_plugin.lora_apply(result, x, handle)
            torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=2e-2)


def measure(case: Case, rounds: int, clock: Clock, choices: list[str]) -> dict[str, Any]:
    """Checks and times one case, all choices of kernels in the same rounds."""
    kernels.unregister_all()
    counts = np.array([rows for _, rows in case.requests])
    adapters = np.array([adapter for adapter, _ in case.requests])
    ranks = np.array(case.ranks, dtype=np.int32)
    first_rows = (np.cumsum((ranks + 7) // 8 * 8) - (ranks + 7) // 8 * 8).astype(np.int32)
    size = (int(counts.sum()), len(counts), len(ranks), ARENA_ROWS, "cpu", torch.bfloat16)
    batches = {choice: kernels.Batch(*size, kernels=choice) for choice in choices}
    layers = make_layers(case.model, list(batches.values()), int(first_rows[-1] + ranks[-1]))
    for batch in batches.values():
        batch.update(adapters, counts, first_rows, ranks)
    inputs = {size: torch.randn(int(counts.sum()), size).bfloat16() for size, _ in case.model.linears}
    extents = list(zip(first_rows.tolist(), (first_rows + ranks).tolist(), strict=True))
    rows = [extents[adapter] if adapter >= 0 else None for adapter in np.repeat(adapters, counts)]
    check(layers[: len(case.model.linears)], inputs, rows)
    base, *loras = times(layers, inputs, rounds, clock)
    return {
        "case": case.name,
        "model": case.model.name,
        "base_ms": base,
        **dict(zip(choices, loras, strict=True)),
    }


def times(layers: list[Layer], inputs: dict[int, Tensor], rounds: int, clock: Clock) -> list[float]:
    """Milliseconds of a step's base products, and of the ops after them by each choice of kernels."""
    seconds = np.array([step(layers, inputs, clock) for _ in range(rounds)])
    found: list[float] = (np.median(seconds, axis=0).sum(axis=0) * 1e3).tolist()
    return found


def step(layers: list[Layer], inputs: dict[int, Tensor], clock: Clock) -> list[list[float]]:
    """Seconds of each layer's base product, and of its op by each choice, over a base output made anew."""
    apply, linear = torch.ops.lora_plugin.lora_apply.default, torch.nn.functional.linear
    spent = []
    for layer in layers:
        x, times = inputs[layer.base.shape[1]], [0.0]
        for handle in layer.handles:
            begin = clock()
            y = linear(x, layer.base)
            between = clock()
            apply(y, x, handle)
            times.append(clock() - between)
            times[0] += (between - begin) / len(layer.handles)
        spent.append(times)
    return spent


def show(result: dict[str, Any], choices: list[str]) -> str:
    """A row: each choice in milliseconds, and as a part of the base products."""
    columns = [
        COLUMNS.format(ms=result[choice], ratio=result[choice] / result["base_ms"]) for choice in choices
    ]
    return ROW.format(**result) + "".join(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kernels", nargs="+", default=["native", "torch"], choices=["native", "torch"])
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    results = []
    print(HEAD + "".join(f" {choice + ' ms':>9}  ratio" for choice in options.kernels))
    with torch.inference_mode():
        for case in CASES:
            if options.case in case.name:
                results.append(measure(case, options.rounds, clock, options.kernels))
                print(show(results[-1], options.kernels), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
