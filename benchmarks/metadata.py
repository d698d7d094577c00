"""What a step's metadata costs on the host: the batch described anew, 256 requests of 8,192 rows.

    python benchmarks/metadata.py [--device cuda] [--rounds 2000] [--json FILE]

Microseconds of the calling thread, medians; every step differs from the one before, but in the last column.
Without a GPU the tiles are copied within pageable host memory; `--device cuda` measures the pinned copy.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lora_plugin.kernels import Batch, available
from lora_plugin.kernels.runs import IntArray, sort_by_adapter
from lora_plugin.kernels.triton.tiles import DeviceTiles

REQUESTS, RANK, BAR_US = 256, 16, 100.0
ADAPTERS = (1, 8, 64)
ROWS = {"prefill": 32, "decode": 1}
"""Rows of each request."""
COLUMNS = ("kernels", "step", "adapters", "sort us", "rest us", "step us", "same step us")


class Step(NamedTuple):
    """What `Batch.update` takes."""

    adapters: IntArray
    counts: IntArray
    first_rows: IntArray
    ranks: IntArray


class Cost(NamedTuple):
    """Microseconds: sorting the rows by adapter, everything else, both, and a step like the one before."""

    kernels: str
    step: str
    adapters: int
    sort_us: float
    rest_us: float
    step_us: float
    same_us: float


def make_steps(adapters: int, rows: int) -> tuple[Step, Step]:
    """Two steps in which every request has another adapter than its neighbours, if there are several.

    The last request of the second uses the base model, so that they differ with one adapter too.
    """
    first_rows = np.arange(adapters, dtype=np.int32) * RANK
    ranks, counts = np.full(adapters, RANK, dtype=np.int32), np.full(REQUESTS, rows)
    order = np.arange(REQUESTS) % adapters
    one = Step(order, counts, first_rows, ranks)
    other = one._replace(adapters=order[::-1].copy())
    other.adapters[-1] = -1
    return one, other


def make_batch(kernels: str, adapters: int, device: torch.device) -> Batch:
    """A batch of these kernels; "triton" on any device: its metadata needs no GPU."""
    size = (REQUESTS * max(ROWS.values()), REQUESTS, adapters, adapters * RANK)
    if kernels != "triton":
        return Batch(*size, "cpu", torch.bfloat16, kernels=kernels)
    batch = Batch(*size, "cpu", torch.bfloat16, kernels="torch")
    batch.tiles = DeviceTiles(size[0], adapters, RANK, device)
    return batch


def median_us(call: Callable[[int], object], rounds: int) -> float:
    """The median of `call(0)`, `call(1)`, ...; a tenth as many before do not count."""
    times = []
    for i in range(-(rounds // 10), rounds):
        started = time.thread_time_ns()
        call(i)
        if i >= 0:
            times.append(time.thread_time_ns() - started)
    return statistics.median(times) / 1e3


def measure(kernels: str, name: str, adapters: int, device: torch.device, rounds: int) -> Cost:
    batch, steps = make_batch(kernels, adapters, device), make_steps(adapters, ROWS[name])
    whole = median_us(lambda i: batch.update(*steps[i % 2]), rounds)
    same = median_us(lambda _: batch.update(*steps[0]), rounds)
    sort = median_us(lambda i: sort_by_adapter(*steps[i % 2]), rounds)
    return Cost(kernels, name, adapters, sort, whole - sort, whole, same)


def table(costs: list[Cost]) -> str:
    """The costs as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for cost in costs:
        cells = (f"{value:.0f}" if isinstance(value, float) else str(value) for value in cost)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="where the device tiles lie")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kernels = ("triton", *available("cpu", torch.bfloat16))
    costs = [
        measure(which, name, adapters, options.device, options.rounds if which != "torch" else 20)
        for which in kernels
        for name in ROWS
        for adapters in ADAPTERS
    ]
    print(table(costs))
    worst = max(cost.step_us for cost in costs if cost.kernels == "triton")
    print(f"device tiles: {worst:.0f} us at most, the bar is {BAR_US:.0f}")
    if options.json:
        result: dict[str, Any] = {"date": date.today().isoformat()}
        result |= {"machine": platform.processor() or platform.machine()}
        result |= {"device": str(options.device), "bar_us": BAR_US, "costs": [c._asdict() for c in costs]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
