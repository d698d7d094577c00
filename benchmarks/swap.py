"""What bringing an adapter in costs: from its folder to host memory by stage, and from there to the arena.

    python benchmarks/swap.py [--device cuda] [--rounds 20] [--json FILE]

The copy to the arena is `Arena.load`, beside one plain copy of the same bytes in the same round, to the same
device. A few layers stand for the model: bytes grow with layers, rates do not. The folder lies in the page
cache, and one thread computes as in the worker's stager; stages are read off a profile of the real `load`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from random_adapter import Shapes, write_folder

from lora_plugin.adapter.load import load
from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.layout import Kind, Layer, ModelLayout, Slice
from lora_plugin.worker.arena import Arena
from lora_plugin.worker.host_memory import HostMemory, page_locked

RANKS = (8, 16, 64)
STAGES = {
    "read": r"'readinto' of|posix\.(read|pread|preadv)",
    "hash": r"'update' of '_hashlib",
    "cast": r"\(add\)|'(float|to)' of",
    "check": r"torch\.aminmax|'item' of",
    "slab": r"torch\.zeros",
    "pack": r"'copy_' of",
}
"""Functions whose own time belongs to a stage; the rest is "other": headers, the match, Python."""


class Model(NamedTuple):
    """The linear layers of a Llama: layers to measure, hidden, k and v, and intermediate sizes."""

    name: str
    layers: int
    hidden: int
    kv: int
    inner: int

    def linears(self) -> dict[str, tuple[dict[str, int], int]]:
        """Per fused layer: the width of each target module, and the width of the input."""
        hidden, inner = self.hidden, self.inner
        return {
            "self_attn.qkv_proj": ({"q_proj": hidden, "k_proj": self.kv, "v_proj": self.kv}, hidden),
            "self_attn.o_proj": ({"o_proj": hidden}, hidden),
            "mlp.gate_up_proj": ({"gate_proj": inner, "up_proj": inner}, hidden),
            "mlp.down_proj": ({"down_proj": hidden}, inner),
        }


MODELS = (Model("SmolLM2-135M", 4, 576, 192, 1536), Model("Llama-8B", 4, 4096, 1024, 14336))


def make_layout(model: Model) -> ModelLayout:
    """The layers as a server would wrap them."""

    def layer(path: str, outputs: dict[str, int], inputs: int) -> Layer:
        parent = path.rpartition(".")[0]
        slices = (
            Slice(f"{parent}.{leaf}", inputs, out, (0, inputs), (0, out)) for leaf, out in outputs.items()
        )
        return Layer(path, Kind.LINEAR, tuple(slices))

    layers = (
        layer(f"model.layers.{i}.{name}", *linear)
        for i in range(model.layers)
        for name, linear in model.linears().items()
    )
    return ModelLayout(tuple(layers), "bfloat16", max(RANKS), {})


def shapes_of(layout: ModelLayout) -> Shapes:
    return {s.name: (s.out_features, s.in_features) for layer in layout.layers for s in layer.slices}


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of the call and what it started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def copy_rates(
    arena: Arena, packed: PackedAdapter, device: torch.device, rounds: int
) -> tuple[float, float, float]:
    """GB/s of `Arena.load`, of a plain copy, and the median of the rounds' ratios."""
    plain = torch.empty_like(packed.slab, device=device).zero_()
    loads, copies = [], []
    for i in range(rounds + 1):
        # Alternates between two places, as an arena in use would.
        first = i % 2 * max(RANKS)
        loads.append(seconds(lambda first=first: arena.load(1, packed, first), device))  # type: ignore[misc]
        arena.drop(1)
        copies.append(seconds(lambda: plain.copy_(packed.slab, non_blocking=True), device))
    del loads[0], copies[0]
    ratio = statistics.median(copy / load for copy, load in zip(copies, loads, strict=True))
    rates = (packed.nbytes / statistics.median(times) / 1e9 for times in (loads, copies))
    return (*rates, ratio)  # type: ignore[return-value]


def stage_times(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of the call by stage, and in all."""
    profile = cProfile.Profile()
    profile.runcall(call)
    stats: dict[tuple[str, int, str], tuple[Any, ...]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = {f"{name} ({name})": values[2] * 1e3 for (_, _, name), values in stats.items()}
    found = {
        stage: sum(ms for name, ms in own.items() if re.search(pattern, name))
        for stage, pattern in STAGES.items()
    }
    total = sum(own.values())
    return {**found, "other": total - sum(found.values()), "all": total}


def measure(model: Model, rank: int, work: Path, device: torch.device, rounds: int) -> dict[str, Any]:
    layout = make_layout(model)
    folder = write_folder(shapes_of(layout), work / f"{model.name}-r{rank}", rank, seed=0, base=model.name)

    def stage() -> PackedAdapter:
        return load(work, folder.name, layout, None, 1 << 34)

    packed = stage()
    if device.type == "cuda":
        packed = HostMemory(page_locked(packed.nbytes), layout).adopt(packed)
    arena = Arena(layout, 2 * max(RANKS), 8, device, torch.bfloat16)
    load_rate, copy_rate, ratio = copy_rates(arena, packed, device, rounds)
    runs = [stage_times(stage) for _ in range(max(3, rounds // 4))]
    stages = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {
        "model": model.name,
        "layers": model.layers,
        "rank": rank,
        "bytes": packed.nbytes,
        "arena_gb_s": load_rate,
        "copy_gb_s": copy_rate,
        "ratio": ratio,
        "stages_ms": stages,
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table; stages in milliseconds."""
    columns = ("model", "rank", "MB", "arena GB/s", "copy GB/s", "ratio", *(f"{s} ms" for s in STAGES))
    columns = (*columns, "other ms", "MB/s staged")
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for r in results:
        stages, megabytes = r["stages_ms"], r["bytes"] / 1e6
        cells = [f"{r['model']}, {r['layers']} layers", str(r["rank"]), f"{megabytes:.1f}"]
        cells += [f"{r['arena_gb_s']:.1f}", f"{r['copy_gb_s']:.1f}", f"{r['ratio']:.2f}"]
        cells += [f"{stages[name]:.1f}" for name in (*STAGES, "other")]
        lines.append("| " + " | ".join([*cells, f"{megabytes / stages['all'] * 1e3:.0f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="where the arena lies")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        results = [
            measure(model, rank, Path(work), options.device, options.rounds)
            for model in MODELS
            for rank in RANKS
        ]
    print(table(results))
    if options.json:
        result: dict[str, Any] = {"date": date.today().isoformat()}
        result |= {"machine": platform.processor() or platform.machine()}
        result |= {"device": str(options.device), "results": results}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
