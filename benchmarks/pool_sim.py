"""The pool without a server: how often an adapter is read again, by eviction policy and kind of traffic.

    python benchmarks/pool_sim.py [--adapters 10000] [--requests 200000] [--json FILE]

Every request goes through the real `AdapterPool`: staged if it is not in host memory, given rows, released.
Requests come one at a time, so nothing waits; a reload takes a fixed part (files, checks) and a part by size.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from lora_plugin.pool import AdapterPool
from lora_plugin.pool.policies import POLICIES

RANKS = (8, 8, 8, 16, 16, 32, 64)
BYTES_PER_ROW = 2_600_000
"""An 8B model, all linear layers, bfloat16."""
SLABS, SLAB_ROWS = 4, 64
FIXED_SECONDS, BYTES_PER_SECOND = 0.02, 1e9


@dataclass(frozen=True)
class Row:
    """One simulation.

    Attributes:
        trace, policy: what came, and what went first.
        host_share: the host cache's budget, as a share of all adapters' bytes.
        hits: share of the requests whose adapter was in host memory.
        reload_seconds: spent reading, per 1,000 requests.
        reload_gb: read, per 1,000 requests.
        device_loads: copies to the device, per 1,000 requests.
        microseconds: the pool's own time for a request.
    """

    trace: str
    policy: str
    host_share: float
    hits: float
    reload_seconds: float
    reload_gb: float
    device_loads: float
    microseconds: float


def zipf(adapters: int, chance: random.Random, exponent: float = 0.9) -> Iterator[int]:
    """A few adapters get most requests, the same few all the time."""
    total = list(accumulate(1 / (rank + 1) ** exponent for rank in range(adapters)))
    while True:
        yield bisect(total, chance.random() * total[-1])


def bursty(adapters: int, chance: random.Random) -> Iterator[int]:
    """Bursts of one adapter each, begun by Zipf; several overlap."""
    begin = zipf(adapters, chance)
    open_bursts: list[list[int]] = []
    while True:
        if len(open_bursts) < 20:
            open_bursts.append([next(begin), chance.randint(5, 200)])
        burst = chance.choice(open_bursts)
        burst[1] -= 1
        if not burst[1]:
            open_bursts.remove(burst)
        yield burst[0]


def drifting(adapters: int, chance: random.Random) -> Iterator[int]:
    """Zipf, and who is popular changes as the day goes on."""
    for number, rank in enumerate(zipf(adapters, chance)):
        yield (rank + number // 500) % adapters


TRACES: dict[str, Callable[[int, random.Random], Iterator[int]]] = {
    "zipf": zipf,
    "bursty": bursty,
    "drifting": drifting,
}


def simulate(trace: str, policy: str, host_share: float, adapters: int, requests: int) -> Row:
    """Play a trace of so many requests."""
    # Which ranks are popular is chance, but the same for every policy.
    ranks = [random.Random(adapter).choice(RANKS) for adapter in range(adapters)]
    sizes = [rank * BYTES_PER_ROW for rank in ranks]
    now = 0.0
    pool = AdapterPool(SLABS, SLAB_ROWS, int(sum(sizes) * host_share), lambda: now, eviction=policy)
    hits, read_seconds, read_bytes = 0, 0.0, 0
    names = TRACES[trace](adapters, random.Random(0))
    began = time.perf_counter()
    for number in range(requests):
        now += 0.01
        adapter = next(names)
        if pool.want(adapter, str(adapter), str(adapter), "/", sizes[adapter]):
            seconds = FIXED_SECONDS + sizes[adapter] / BYTES_PER_SECOND
            assert pool.staged(adapter, ranks[adapter], sizes[adapter], seconds)
            read_seconds, read_bytes = read_seconds + seconds, read_bytes + sizes[adapter]
        else:
            hits += 1
        request = str(number)
        pool.acquire(request, adapter)
        pool.begin_step({})
        assert pool.try_admit(adapter, request)
        pool.take_orders()
        pool.release(request)
    spent = time.perf_counter() - began
    loads = pool.snapshot()["counters"]["loads"]
    per_thousand = 1000 / requests
    return Row(
        trace,
        policy,
        host_share,
        round(hits / requests, 4),
        round(read_seconds * per_thousand, 2),
        round(read_bytes * per_thousand / 1e9, 2),
        round(loads * per_thousand, 1),
        round(spent / requests * 1e6, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [
        simulate(trace, policy, share, args.adapters, args.requests)
        for trace in TRACES
        for share in (0.02, 0.1)
        for policy in POLICIES
    ]
    print(f"{args.adapters} adapters, {args.requests} requests; s, GB and copies per 1,000 requests")
    print("| traffic | host cache | eviction | hits | reload s | GB read | device copies | pool us |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row.trace} | {row.host_share:.0%} | {row.policy} | {row.hits:.1%} "
            f"| {row.reload_seconds:.1f} | {row.reload_gb:.2f} | {row.device_loads:.0f} "
            f"| {row.microseconds:.0f} |"
        )
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
