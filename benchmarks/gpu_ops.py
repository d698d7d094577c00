"""A decoder layer's adapters on a GPU: our kernels, vLLM's and SGLang's, eager and as a graph, and the limit.

    python benchmarks/gpu_ops.py --fetch              # the peers' kernels from PyPI, into .cache/peers
    python benchmarks/gpu_ops.py [--rows 1 16 ...] [--json FILE]
    TRITON_INTERPRET=1 python benchmarks/gpu_ops.py --device cpu     # the gate alone, tiny, without a GPU

Every contestant adds the same adapters to the same outputs, and must come within rounding of float64 before
it is timed. A time is that of all linear layers of one decoder layer, in microseconds; copies of the layer
take turns, so that no weights stay in the L2 cache. The limit is the bytes that have to move, at the rate of
a plain copy. Metadata and SGLang's routes are made once, before: only the kernels are timed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import peers
import torch
from gpu_cases import ADAPTERS, MODELS, RANKS, ROWS, cases, random_weights
from gpu_contestants import CONTESTANTS
from gpu_measure import copy_bandwidth, entrants, measure

COLUMNS = ("model", "rows", "adapters", "ranks", "limit us")


def row_of(result: dict[str, Any], names: Sequence[str]) -> str:
    """A line of the table: microseconds, and what became of a contestant that failed."""
    cells = [str(result[key]) for key in ("model", "rows", "adapters", "ranks")] + [
        f"{result['limit_us']:.1f}"
    ]
    columns = (column for name in names for column in (name, f"{name} graph"))
    cells += [f"{result['us'][column]:.1f}" if column in result["us"] else "failed" for column in columns]
    return "| " + " | ".join(cells) + " |"


def head(names: Sequence[str]) -> str:
    columns = [*COLUMNS, *(column for name in names for column in (name, f"{name} graph"))]
    return "| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns)


def run_gates(names: Sequence[str]) -> None:
    """The gate of every contestant at tiny shapes in Triton's interpreter, which rounds bfloat16 wrongly."""
    for case in cases(["tiny"], [1, 18], [1, 4], ["8", "mixed"]):
        layer = [
            random_weights(case, linear, torch.device("cpu"), torch.float16) for linear in case.model.linears
        ]
        for name, made in entrants(names, case, [layer]).items():
            print(f"{case.rows} rows, {case.adapters} adapters, ranks {case.ranks_name}: {name}:", end=" ")
            print(made if isinstance(made, str) else "right", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--fetch", action="store_true", help="download the peers' kernels, and stop")
    parser.add_argument("--models", nargs="+", default=[m for m in MODELS if m != "tiny"], choices=MODELS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--adapters", nargs="+", type=int, default=ADAPTERS)
    parser.add_argument("--ranks", nargs="+", default=list(RANKS), choices=RANKS)
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.fetch:
        peers.fetch()
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "gpu_ops needs a CUDA device; TRITON_INTERPRET=1 ... --device cpu runs its gate without one"
        )
    if options.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("--device cpu runs the gate in Triton's interpreter: set TRITON_INTERPRET=1")
    for peer in {name.split()[0] for name in options.contestants} - {"ours"}:
        try:
            peers.load(peer)
        except FileNotFoundError as error:
            raise SystemExit(f"{error}; or name --contestants") from error
    with torch.inference_mode():
        if options.device == "cpu":
            run_gates(options.contestants)
        else:
            run(options)


def run(options: argparse.Namespace) -> None:
    bandwidth = copy_bandwidth()
    result = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "bandwidth": bandwidth,
    }
    print(f"{result['device']}, a copy moves {bandwidth / 1e12:.2f} TB/s\n{head(options.contestants)}")
    results = []
    for case in cases(options.models, options.rows, options.adapters, options.ranks):
        results.append(measure(case, options.contestants, options.rounds, bandwidth))
        print(row_of(results[-1], options.contestants), flush=True)
        torch.cuda.empty_cache()
    for failed in (r for r in results if r["failures"]):
        print(*(failed[key] for key in ("model", "rows", "adapters", "ranks", "failures")))
    if options.json:
        options.json.write_text(json.dumps(result | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
