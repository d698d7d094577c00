"""What the kernels take when they are built ahead of time; needs no GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from lora_plugin.kernels.triton.tables import TABLES

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
aot_table = pytest.importorskip("aot_table")

WIDE = re.compile(r"cp\.async\.cg\.shared\.global .*, 0x10,|ld\.global\.v4\.b32|load_dwordx4")
"""Loads of 16 bytes, as PTX and AMD's assembly have them."""


def _few() -> Iterator[tuple[str, int]]:
    """The tables' corners: single rows, most planes with small tiles, and with large ones."""
    yield ("sm_80", 4)
    yield from product(("sm_90", "gfx942"), (0, 1, 4))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_steps_past_the_end_of_in_build_without_spills(arch: str) -> None:
    target, _ = aot_table.TARGETS[arch]
    for entry in (0, 1, -1):
        build = next(aot_table.builds(TABLES[arch][entry][1], even=False))
        assert aot_table.usage(aot_table.compile_build(build, target, "bf16"), target).spills == 0


@pytest.mark.parametrize(("arch", "entry"), _few())
def test_no_spills_and_shared_memory_within_the_device(arch: str, entry: int) -> None:
    target, limit = aot_table.TARGETS[arch]
    choice = TABLES[arch][entry][1]
    for build in aot_table.builds(choice):
        compiled = aot_table.compile_build(build, target, "bf16")
        used = aot_table.usage(compiled, target)
        if "embed" not in build.kernel.__name__:
            assert WIDE.search(compiled.asm.get("ptx") or compiled.asm["amdgcn"]), aot_table.describe(build)
        assert used.spills == 0, aot_table.describe(build)
        assert used.shared <= limit * 1024, aot_table.describe(build)
        if arch == "sm_90" and choice.height <= 16:
            assert used.registers <= 80, aot_table.describe(build)
        if arch == "sm_90" and choice.height == 64:
            assert used.matrix == ("-" if "embed" in build.kernel.__name__ else "wgmma")


def test_the_documented_table_is_current() -> None:
    """docs/kernels.md names every kernel and tile that the tables hold."""
    text = (Path(__file__).parents[2] / "docs/kernels.md").read_text()
    documented = text.split(aot_table.MARKERS[0])[1].split(aot_table.MARKERS[1])[0]
    missing = [
        row for row in aot_table.plan(aot_table.TARGETS, aot_table.DTYPES) if f"| {row} |" not in documented
    ]
    assert not missing
