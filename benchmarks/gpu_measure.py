"""The gate and the clock of `gpu_ops`: nothing is timed that is not right."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_cases import Case, Weights, expected, random_weights
from gpu_contestants import CONTESTANTS, Apply
from torch import Tensor

from lora_plugin import kernels

TURNING_BYTES = 256 << 20
"""Weights that take turns: several times the L2 cache of an H200."""
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 2e-2}


def inputs(case: Case, weights: Weights) -> tuple[Tensor, Tensor]:
    """y and x of order one."""
    like, linear = weights.a[0], weights.linear
    y, x = (torch.randn(case.rows, n, device=like.device) for n in (sum(linear.widths), linear.inputs))
    return y.to(like.dtype), x.to(like.dtype)


def gate(case: Case, weights: Weights, apply: Apply) -> None:
    """Raises AssertionError when the result is not that of float64."""
    y, x = inputs(case, weights)
    right, tolerance = expected(y, x, case, weights), TOLERANCE[y.dtype]
    apply(y, x)
    torch.testing.assert_close(y.double(), right, rtol=tolerance, atol=tolerance)


def entrants(names: Sequence[str], case: Case, layers: list[list[Weights]]) -> dict[str, Any]:
    """By name: the functions of all copies of the layer, or why there are none. Ours must pass."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            contestant = CONTESTANTS[name](case, layers[0][0].a[0].device)
            found[name] = [[contestant.layer(weights) for weights in layer] for layer in layers]
            for weights, apply in zip(layers[0], found[name][0], strict=True):
                gate(case, weights, apply)
        except Exception as error:
            if name == "ours":
                raise
            found[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return found


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Of one call, on the device."""
    cuda: Any = torch.cuda
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / repeats


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a graph; runs it on the graph's stream first: SGLang keeps scratch and routes by stream."""
    cuda: Any = torch.cuda
    graph, stream = torch.cuda.CUDAGraph(), cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def measure(case: Case, names: Sequence[str], rounds: int, bandwidth: float) -> dict[str, Any]:
    """Medians of rounds in which all contestants take turns, per decoder layer."""
    kernels.unregister_all()
    device, copies = torch.device("cuda"), max(1, min(32, TURNING_BYTES // case.weight_bytes))
    layers = [
        [random_weights(case, linear, device, torch.bfloat16) for linear in case.model.linears]
        for _ in range(copies)
    ]
    batch = [inputs(case, weights) for weights in layers[0]]

    def pass_over(applies: list[list[Apply]]) -> Callable[[], None]:
        def run() -> None:
            for layer in applies:
                for apply, (y, x) in zip(layer, batch, strict=True):
                    apply(y, x)

        return run

    calls: dict[str, Callable[[], object]] = {}
    failures: dict[str, str] = {}
    for name, made in entrants(names, case, layers).items():
        if isinstance(made, str):
            failures[name] = made
            continue
        calls[name] = pass_over(made)
        calls[name]()
        calls[f"{name} graph"] = captured(calls[name])
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(microseconds(call, 5) / copies)
    medians = {name: statistics.median(found) for name, found in times.items()}
    limit = case.limit_bytes / bandwidth * 1e6
    return describe(case) | {"limit_us": limit, "copies": copies, "us": medians, "failures": failures}


def describe(case: Case) -> dict[str, Any]:
    return {
        "model": case.model.name,
        "rows": case.rows,
        "adapters": case.adapters,
        "ranks": case.ranks_name,
        "limit_bytes": case.limit_bytes,
    }


def copy_bandwidth() -> float:
    """Bytes per second of a plain copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return (
        2
        * source.nbytes
        / statistics.median(microseconds(lambda: target.copy_(source), 5) for _ in range(7))
        * 1e6
    )
