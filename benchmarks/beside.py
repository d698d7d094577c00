"""What packing an adapter takes from the steps that run beside it: in a thread of the worker, in the process.

    python benchmarks/beside.py --model FOLDER [--rounds 20] [--json FILE]

A step stands for the engine's: many short computations, between which Python is needed. It runs pinned to one
core, packing on the others; the two ways take turns. A round's excess is how much longer its steps took, all
together, than as many undisturbed ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from random_adapter import write_adapter

from lora_plugin.adapter.load import load
from lora_plugin.aside import cores, step_aside
from lora_plugin.layout import ModelLayout
from lora_plugin.model_folder.layout import folder_layout
from lora_plugin.model_folder.locate import locate
from lora_plugin.worker.packing import PackingProcess

RANK = 32
COMPUTATIONS = 150
UNDISTURBED = 12
MAX_BYTES = 1 << 30


def step(x: torch.Tensor) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    for _ in range(COMPUTATIONS):
        torch.sin_(x)
        for _ in range(300):
            pass
    return (time.perf_counter() - started) * 1e3


def round_of(pack: Callable[[], object], x: torch.Tensor) -> dict[str, float]:
    """Steps before and while an adapter is packed; milliseconds."""
    engine = cores()
    undisturbed = [step(x) for _ in range(UNDISTURBED)]

    def work() -> None:
        step_aside(engine)
        pack()

    thread = threading.Thread(target=work)
    thread.start()
    started, beside = time.perf_counter(), []
    while thread.is_alive():
        beside.append(step(x))
    seconds = time.perf_counter() - started
    thread.join()
    usual = statistics.median(undisturbed)
    return {
        "longest undisturbed ms": max(undisturbed),
        "longest beside ms": max(beside),
        "excess ms": sum(beside) - len(beside) * usual,
        "load ms": seconds * 1e3,
    }


def measure(root: Path, name: str, layout: ModelLayout, rounds: int) -> dict[str, dict[str, float]]:
    """By way of packing: medians over the rounds."""
    everywhere = cores()
    os.sched_setaffinity(0, {min(everywhere)})
    process = PackingProcess(layout)
    ways: dict[str, Callable[..., object]] = {"thread": load, "process": process.load}
    x = torch.randn(30_000)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, pack in ways.items():
            result = round_of(lambda pack=pack: pack(root, name, layout, None, MAX_BYTES), x)  # type: ignore[misc]
            # The first round warms up.
            if number:
                found[way].append(result)
    process.close()
    os.sched_setaffinity(0, everywhere)
    return {
        way: {key: statistics.median(each[key] for each in results) for key in results[0]}
        for way, results in found.items()
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """As Markdown."""
    columns = list(next(iter(results.values())))
    lines = ["| packed by a | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for way, result in results.items():
        lines.append(f"| {way} | " + " | ".join(f"{result[column]:.1f}" for column in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layout = folder_layout(locate(str(arguments.model)), None, 64)
    with tempfile.TemporaryDirectory() as work:
        write_adapter(arguments.model, Path(work) / "adapter", RANK, seed=0)
        results = measure(Path(work), "adapter", layout, arguments.rounds)
    print(table(results))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"date": date.today().isoformat(), "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
