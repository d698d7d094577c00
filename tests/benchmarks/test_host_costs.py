"""The benchmarks of the host's part still run, and measure what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
metadata = pytest.importorskip("metadata")
swap = pytest.importorskip("swap")
CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", metadata.ROWS.values(), ids=metadata.ROWS)
@pytest.mark.parametrize("adapters", metadata.ADAPTERS)
def test_the_metadata_s_steps_are_as_large_as_promised_and_never_alike(adapters: int, rows: int) -> None:
    one, other = metadata.make_steps(adapters, rows)
    assert not np.array_equal(one.adapters, other.adapters)
    assert one.counts.sum() == metadata.REQUESTS * rows
    assert set(one.adapters) == set(range(adapters))
    batch = metadata.make_batch("triton", adapters, CPU)
    for step in (one, other):
        batch.update(*step)
        assert batch.num_rows == metadata.REQUESTS * rows
        count, _ = batch.tiles.of(64)
        assert count.item() > 0


def test_metadata_costs_are_of_three_parts() -> None:
    cost = metadata.measure("triton", "decode", 8, CPU, rounds=20)
    assert cost.step_us == pytest.approx(cost.sort_us + cost.rest_us)
    assert cost.same_us > 0


def test_the_stages_of_a_load_add_up(tmp_path: Path) -> None:
    model = swap.Model("tiny", 1, 64, 32, 96)
    result = swap.measure(model, 8, tmp_path, CPU, rounds=2)
    stages = result["stages_ms"]
    assert set(stages) == {*swap.STAGES, "other", "all"}
    assert all(stages[name] > 0 for name in swap.STAGES)
    assert result["bytes"] == 2 * 8 * sum(layer.row_elements for layer in swap.make_layout(model).layers)
    assert result["ratio"] > 0
