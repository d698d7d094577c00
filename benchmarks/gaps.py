"""The longest gap between the tokens of running streams while many adapters are loaded and reloaded.

Four streams run on one real server; short requests arrive beside them at a steady pace. In each turn every
second one, in a random order, is quiet: it asks for an adapter that is on the device. The others differ by
turn: a folder of 20 MB is dropped before; or they ask for one of 50 such adapters that is new (to be read,
packed, copied), or for one again that has left host memory. A gap counts for what arrived last before it
ends, so that whatever else the machine does spoils both alike. Medians over the rounds, each with other
adapters.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from cpu_serving import vocabulary_of
from loads import MIXED, RANKS, Client
from random_adapter import write_adapter
from servers import BenchServer

ADAPTERS = 50
RANK = 32
HOST_MEMORY = "450MiB"
"""Room for the streams' adapters and some 20 others."""
PACE = 0.4
"""Seconds between two arrivals."""
WARM = "warm"
QUIET = "quiet"


@dataclass(frozen=True)
class Arrival:
    """A short request, and what is done before it."""

    kind: str
    name: str
    before: Callable[[], object] = lambda: None


Gap = tuple[float, float]
"""When it began and ended, in seconds."""
Turn = dict[str, float]


async def turn(client: Client, server: BenchServer, arrivals: Sequence[Arrival], tokens: int) -> Turn:
    """Streams of `tokens` tokens begin anew until all have arrived; gaps in milliseconds, loads by count."""
    over = asyncio.Event()

    async def stream(model: str) -> list[Gap]:
        gaps: list[Gap] = []
        while not over.is_set():
            gaps += itertools.pairwise(await client.token_times(server, model, tokens))
        return gaps

    before = await counts(client, server)
    streams = asyncio.gather(*map(stream, MIXED))
    times, requests = [], []
    for arrival in arrivals:
        await asyncio.sleep(PACE)
        arrival.before()
        times.append(time.perf_counter())
        requests.append(asyncio.create_task(client.complete(server, arrival.name, 4, 2)))
    await asyncio.gather(*requests)
    over.set()
    gaps = list(itertools.chain.from_iterable(await streams))
    after = await counts(client, server)
    result = {}
    for quiet in (False, True):
        lengths = sorted(
            stop - start
            for start, stop in gaps
            if quiet in {arrivals[i].kind == QUIET for i in _arrived(times, start, stop)}
        )
        suffix = ", quiet" if quiet else ""
        result[f"longest ms{suffix}"] = lengths[-1] * 1e3
        result[f"99% ms{suffix}"] = lengths[len(lengths) * 99 // 100] * 1e3
        result[f"median ms{suffix}"] = lengths[len(lengths) // 2] * 1e3
    return result | {name: after[name] - before[name] for name in after}


def _arrived(times: Sequence[float], start: float, stop: float) -> list[int]:
    """What arrived last before the gap's end; where the gap is a long one, also what had before it began."""
    last = bisect.bisect(times, stop) - 1
    first = bisect.bisect(times, start) - 1 if stop - start > PACE / 2 else last
    return [i for i in range(max(first, 0), last + 1) if start - times[i] < PACE]


async def counts(client: Client, server: BenchServer) -> dict[str, float]:
    return {
        "copies to the arena": await client.counter(server, "lora_plugin_loads_total"),
        "reads": await client.counter(server, "lora_plugin_load_seconds_count", stage="pack"),
    }


async def measure(
    client: Client, server: BenchServer, work: Path, directory: Path, arguments: argparse.Namespace
) -> dict[str, list[Turn]]:
    """By name, the turns of each kind."""
    for name in (*MIXED, WARM):
        await client.complete(server, name, 4, 2)
    turns: dict[str, list[Turn]] = {"dropped": [], "new": [], "again": []}
    shuffle = random.Random(0).shuffle
    for number in range(arguments.rounds):
        names = [f"n{number}-{i}" for i in range(ADAPTERS)]
        for index, name in enumerate(names):
            write_adapter(server.model, work / name, arguments.rank, seed=10 + number * ADAPTERS + index)
        # Else the system writes a gigabyte beside one of the turns.
        os.sync()
        for kind, done in turns.items():
            arrivals = []
            for name in names:
                drop = partial((work / name).rename, directory / name)
                busy = Arrival(kind, WARM, drop) if kind == "dropped" else Arrival(kind, name)
                pair = [busy, Arrival(QUIET, WARM)]
                shuffle(pair)
                arrivals += pair
            done.append(await turn(client, server, arrivals, arguments.tokens))
            for name in names:
                await client.listed(server, name)
    return turns


async def run(work: Path, arguments: argparse.Namespace) -> dict[str, list[Turn]]:
    model: Path = arguments.model
    directory = work / "adapters"
    directory.mkdir()
    for seed, name in enumerate(MIXED[1:]):
        write_adapter(model, directory / name, RANKS[name], seed=seed)
    write_adapter(model, directory / WARM, arguments.rank, seed=9)
    env = {
        "LORA_PLUGIN_ADAPTER_DIR": str(directory),
        "LORA_PLUGIN_ADMIN_PORT": "0",
        "LORA_PLUGIN_HOST_MEMORY": HOST_MEMORY,
        "LORA_PLUGIN_PREFETCH": "0",
    }
    highest = str(max(RANK, arguments.rank))
    flags = ("--max-loras", "4", "--max-lora-rank", highest, "--dtype", arguments.dtype)
    server = BenchServer("plugin", model, work / "plugin.log", flags, env)
    try:
        server.start()
        # Else it waits for steps that it shares a core with, and notes the tokens of several as one.
        os.sched_setaffinity(0, os.sched_getaffinity(0) - server.bound_cores() or os.sched_getaffinity(0))
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=600)
        ) as session:
            client = Client(session, vocabulary_of(model))
            return await measure(client, server, work, directory, arguments)
    finally:
        server.stop()


def table(turns: dict[str, list[Turn]]) -> str:
    """Medians over the turns of each kind, as Markdown."""
    columns = list(turns["new"][0])
    lines = ["| turn | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name, kind in turns.items():
        medians = [f"{statistics.median(each[column] for each in kind):.0f}" for column in columns]
        lines.append(f"| {name}, median of {len(kind)} | " + " | ".join(medians) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    parser.add_argument("--rank", type=int, default=RANK, help="of the adapters that are loaded")
    parser.add_argument("--dtype", default="auto", help="the server's; bfloat16 is slow on some processors")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        turns = asyncio.run(run(Path(work), arguments))
    print(table(turns))
    result: dict[str, Any] = {"turns": turns, "date": date.today().isoformat(), "model": arguments.model.name}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
