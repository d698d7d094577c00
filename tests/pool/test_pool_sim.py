"""The simulator that compares eviction policies: what docs/performance.md says of them, on a small scale."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from pool_sim import simulate


@pytest.mark.parametrize(("trace", "better"), [("zipf", "cost"), ("drifting", "cost"), ("bursty", "lru")])
def test_which_policy_reads_less(trace: str, better: str) -> None:
    worse = {"cost": "lru", "lru": "cost"}[better]
    read = {policy: simulate(trace, policy, 0.02, 1000, 4000) for policy in (better, worse)}
    assert read[better].reload_seconds < read[worse].reload_seconds
    assert read[better].hits > read[worse].hits
