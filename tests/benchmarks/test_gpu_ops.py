"""What of the GPU benchmark can be checked without one: its cases, its limit, its gate in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lora_plugin.kernels import LayerWeights, reference

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
gpu_cases = pytest.importorskip("gpu_cases")
gpu_measure = pytest.importorskip("gpu_measure")
gpu_ops = pytest.importorskip("gpu_ops")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "gpu_ops.py"), *arguments]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_every_adapter_of_a_case_has_a_row() -> None:
    options = gpu_ops.parse([])
    found = list(gpu_ops.cases(options.models, options.rows, options.adapters, options.ranks))
    assert {case.model.name for case in found} == {"Llama-8B", "Llama-70B-TP8"}
    assert {case.rows for case in found} >= {1, 16, 512}
    assert {case.adapters for case in found} == {1, 4, 16, 64}
    for case in found:
        assert set(case.row_adapters) == set(range(case.adapters))
        assert len(case.ranks) == case.adapters
        assert case.ranks_name != "mixed" or len(set(case.ranks)) > 1


def test_the_limit_counts_every_byte_once() -> None:
    case = gpu_cases.Case(gpu_cases.LLAMA_8B, 2, 1, "16")
    hidden, kv, inner = 4096, 1024, 14336
    a = 3 * hidden + hidden + 2 * hidden + inner
    b = (hidden + 2 * kv) + hidden + 2 * inner + hidden
    assert case.weight_bytes == 2 * 16 * (a + b) == 2621440
    x = hidden + hidden + hidden + inner
    assert case.limit_bytes == case.weight_bytes + 2 * 2 * (x + 2 * b)


def test_the_gate_knows_the_reference_from_nothing() -> None:
    case = gpu_cases.Case(gpu_cases.TINY, 5, 4, "mixed")
    for linear in case.model.linears:
        weights = gpu_cases.random_weights(case, linear, torch.device("cpu"), torch.float16)
        y, x = gpu_measure.inputs(case, weights)
        arena = LayerWeights(torch.cat(weights.a), tuple(map(torch.cat, zip(*weights.b, strict=True))))
        ends = torch.tensor(case.ranks).cumsum(0).tolist()
        extents = [(end - rank, end) for end, rank in zip(ends, case.ranks, strict=True)]
        rows = [extents[adapter] for adapter in case.row_adapters]
        right = reference.lora_apply(y, x, arena, rows)
        torch.testing.assert_close(gpu_cases.expected(y, x, case, weights), right)
        with pytest.raises(AssertionError):
            gpu_measure.gate(case, weights, lambda y, x: None)


def test_ours_passes_the_gate_in_the_interpreter() -> None:
    done = run("--device", "cpu", "--contestants", "ours", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.endswith("ours: right") for line in lines)


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "needs a CUDA device" in line
