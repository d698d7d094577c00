"""Builds every kernel ahead of time, without a GPU, and writes what it takes into docs/kernels.md.

    python benchmarks/aot_table.py [--write docs/kernels.md] [--arch sm_90 ...] [--dtype bfloat16 ...]

Exits with 1 when a kernel spills or needs more shared memory than the device has.
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lora_plugin.kernels.triton.expand import expand
from lora_plugin.kernels.triton.shrink import embed, shrink
from lora_plugin.kernels.triton.tables import TABLES, Choice, choose_shape

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163),
    "sm_90": (GPUTarget("cuda", 90, 32), 227),
    "sm_100": (GPUTarget("cuda", 100, 32), 227),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),
    "other": (GPUTarget("cuda", 80, 32), 48),
}
"""The target of each table and the KB of shared memory that a block may have."""
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DTYPES = ("bfloat16", "float32")
"""Those of the document; float16 takes what bfloat16 takes, within a few registers."""
SLICES = 3
MARKERS = ("<!-- aot table -->", "<!-- end of aot table -->")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Build(NamedTuple):
    """One kernel to build: its constants and launch options."""

    kernel: Any
    constants: dict[str, Any]
    options: dict[str, int]


class Usage(NamedTuple):
    """What a built kernel takes."""

    registers: int
    spills: int
    shared: int
    matrix: str


def builds(choice: Choice, even: bool = True) -> Iterator[Build]:
    """The kernels of one entry of a table; `even`: for a layer whose `in` is a multiple of shrink's steps."""
    tile = {"ROWS": choice.height}
    ranks, extent, warps, stages = choice.shrink
    constants = {"SPLIT": choice.split, "RANKS": ranks, "DEPTH": extent, "EVEN": even}
    yield Build(shrink, tile | constants, {"num_warps": warps, "num_stages": stages})
    yield Build(embed, tile | {"RANKS": 16}, {"num_warps": warps})
    ranks, extent, warps, stages = choice.expand
    constants = {"SPLIT": choice.split, "SLICES": SLICES, "RANKS": ranks, "COLS": extent, "ALIGNED": True}
    yield Build(expand, tile | constants, {"num_warps": warps, "num_stages": stages})


def compile_build(build: Build, target: GPUTarget, dtype: str) -> Any:
    """Compiles as the launcher would where addresses and sizes are multiples of 16."""
    types = {"x": dtype, "a": dtype, "y": dtype, "ids": "i64", "planes": "fp32", "slices": "i64"}
    types |= dict.fromkeys(("count", "records", "rows"), "i32")
    names = list(inspect.signature(build.kernel.fn).parameters)
    signature = {n: f"*{types[n]}" if n in types else "i32" for n in names} | dict.fromkeys(
        build.constants, "constexpr"
    )
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in build.constants}
    source = ASTSource(build.kernel, signature, build.constants, attributes)
    return triton.compile(source, target=target, options=build.options)


def usage(compiled: Any, target: GPUTarget) -> Usage:
    """Registers and spills as the assembler reports them."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        value = {n: int(v) for n, v in re.findall(r"\.(\w+_(?:count|size)):\s+(\d+)", text)}
        spills = sum(value[n] for n in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"))
        return Usage(value["vgpr_count"], spills, compiled.metadata.shared, _matrix(text, "mfma"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = (int(re.findall(rf"{n}:(\d+)", report)[-1]) for n in ("REG", "STACK", "LOCAL"))
    matrix = _matrix(compiled.asm["ptx"], "tcgen05.mma", "wgmma", "mma.sync")
    return Usage(registers, stack + local, compiled.metadata.shared, matrix)


def _matrix(text: str, *names: str) -> str:
    return next((name for name in names if name in text), "-")


def plan(archs: Iterable[str], dtypes: Iterable[str]) -> dict[str, tuple[str, str, Build]]:
    """By row of the table: architecture, dtype and what to build; each kernel and tile once."""
    found = {}
    for arch, name in product(archs, dtypes):
        for most, _ in TABLES[arch]:
            for build in builds(choose_shape(arch, most, getattr(torch, name))):
                row = f"{arch} | {TYPES[name]} | {build.kernel.__name__} | {describe(build)}"
                found[row] = (arch, TYPES[name], build)
    return found


def table(archs: Iterable[str], dtypes: Iterable[str]) -> tuple[list[str], list[str]]:
    """The rows of the table, and the faults found."""
    rows, faults = [], []
    for name, (arch, dtype, build) in plan(archs, dtypes).items():
        target, limit = TARGETS[arch]
        used = usage(compile_build(build, target, dtype), target)
        rows.append("| " + " | ".join(map(str, (name, *used))) + " |")
        print(rows[-1], file=sys.stderr)
        if used.spills or used.shared > limit * 1024:
            faults.append(rows[-1])
    return rows, faults


def describe(build: Build) -> str:
    """Rows x ranks x elements of a step; what the split changes in shrink is arithmetic only."""
    c, o = build.constants, build.options
    tile = [c["ROWS"], c["RANKS"], *(c[n] for n in ("DEPTH", "COLS") if n in c)]
    split = f", {c['SPLIT']} planes" if build.kernel is expand else ""
    stages = f", {o['num_stages']} stages" if "num_stages" in o else ""
    return f"{'x'.join(map(str, tile))}{split}, {o['num_warps']} warps{stages}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--arch", nargs="*", default=TARGETS, choices=TARGETS)
    parser.add_argument("--dtype", nargs="*", default=DTYPES, choices=TYPES)
    args = parser.parse_args()
    rows, faults = table(args.arch, args.dtype)
    columns = ("table", "dtype", "kernel", "tile", "registers", "spills", "shared (B)", "matrix unit")
    text = "\n".join([f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns), *rows])
    print(text)
    if args.write:
        before, rest = args.write.read_text().split(MARKERS[0])
        after = rest.split(MARKERS[1])[1]
        args.write.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}")
    for fault in faults:
        print(f"over the limit: {fault}", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
