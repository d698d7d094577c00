"""The longest gap between the tokens of running streams while many adapters are loaded and reloaded.

Four streams run on one real server; short requests arrive beside them at a steady pace. In the quiet turns
all of them ask for an adapter that a stream uses, too; then 50 folders are dropped beside that. In the
loading turns each asks for another of these 50 adapters of 20 MB, first when they are new (read, packed,
copied), then again, when they have left host memory and have to be read anew. Each round has a turn of each
kind, and other adapters; medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
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


Turn = dict[str, float]


async def turn(
    client: Client,
    server: BenchServer,
    names: Sequence[str],
    tokens: int,
    beside: Callable[[int], object] = lambda _: None,
) -> Turn:
    """Streams of `tokens` tokens begin anew until every name was asked for; gaps in milliseconds.

    Before the request with each index `beside` is called with it.
    """
    over = asyncio.Event()

    async def stream(model: str) -> list[float]:
        gaps: list[float] = []
        while not over.is_set():
            gaps += await client.gaps(server, model, tokens)
        return gaps

    before = await counts(client, server)
    streams = asyncio.gather(*map(stream, MIXED))
    arrivals = []
    for index, name in enumerate(names):
        await asyncio.sleep(PACE)
        beside(index)
        arrivals.append(asyncio.create_task(client.complete(server, name, 4, 2)))
    await asyncio.gather(*arrivals)
    over.set()
    gaps = sorted(itertools.chain.from_iterable(await streams))
    after = await counts(client, server)
    return {
        "longest ms": gaps[-1] * 1e3,
        "99% ms": gaps[len(gaps) * 99 // 100] * 1e3,
        "median ms": gaps[len(gaps) // 2] * 1e3,
        **{name: after[name] - before[name] for name in after},
    }


async def counts(client: Client, server: BenchServer) -> dict[str, float]:
    return {
        "copies to the arena": await client.counter(server, "lora_plugin_loads_total"),
        "reads": await client.counter(server, "lora_plugin_load_seconds_count", stage="pack"),
    }


async def measure(
    client: Client, server: BenchServer, work: Path, directory: Path, tokens: int, rounds: int
) -> dict[str, list[Turn]]:
    """By name, the turns of each kind."""
    warm = [MIXED[-1]] * ADAPTERS
    for name in MIXED:
        await client.complete(server, name, 4, 2)
    turns: dict[str, list[Turn]] = {"quiet": [], "dropped": [], "new": [], "again": []}
    for number in range(rounds):
        names = [f"n{number}-{i}" for i in range(ADAPTERS)]
        for index, name in enumerate(names):
            write_adapter(server.model, work / name, RANK, seed=10 + number * ADAPTERS + index)
        # Else the system writes a gigabyte beside one of the turns.
        os.sync()

        def drop(index: int, names: Sequence[str] = names) -> None:
            (work / names[index]).rename(directory / names[index])

        turns["quiet"].append(await turn(client, server, warm, tokens))
        turns["dropped"].append(await turn(client, server, warm, tokens, drop))
        for name in names:
            await client.listed(server, name)
        turns["new"].append(await turn(client, server, names, tokens))
        turns["again"].append(await turn(client, server, names, tokens))
    return turns


async def run(model: Path, work: Path, tokens: int, rounds: int) -> dict[str, list[Turn]]:
    directory = work / "adapters"
    directory.mkdir()
    for seed, name in enumerate(MIXED[1:]):
        write_adapter(model, directory / name, RANKS[name], seed=seed)
    env = {
        "LORA_PLUGIN_ADAPTER_DIR": str(directory),
        "LORA_PLUGIN_ADMIN_PORT": "0",
        "LORA_PLUGIN_HOST_MEMORY": HOST_MEMORY,
        "LORA_PLUGIN_PREFETCH": "0",
    }
    server = BenchServer("plugin", model, work / "plugin.log", ("--max-loras", "4"), env)
    try:
        server.start()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=600)
        ) as session:
            client = Client(session, vocabulary_of(model))
            return await measure(client, server, work, directory, tokens, rounds)
    finally:
        server.stop()


def table(turns: dict[str, list[Turn]]) -> str:
    """Medians over the turns of each kind, as Markdown."""
    columns = list(turns["quiet"][0])
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
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        turns = asyncio.run(run(arguments.model, Path(work), arguments.tokens, arguments.rounds))
    print(table(turns))
    result: dict[str, Any] = {"turns": turns, "date": date.today().isoformat(), "model": arguments.model.name}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
