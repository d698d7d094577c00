"""The longest gap between the tokens of running streams while many adapters are loaded, evicted and reloaded.

Four streams run on one real server; short requests arrive beside them at a steady pace. In the quiet turn
all of them ask for the base model. In the loading turns each asks for another of 50 adapters of 20 MB, first
when they are new (read, packed, copied), then again, when three in five have left host memory and have to be
read anew. The turns are compared within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
from collections.abc import Sequence
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


async def turn(client: Client, server: BenchServer, names: Sequence[str], tokens: int) -> dict[str, float]:
    """Streams of `tokens` tokens begin anew until every name was asked for; gaps in milliseconds."""
    over = asyncio.Event()

    async def stream(model: str) -> list[float]:
        gaps: list[float] = []
        while not over.is_set():
            gaps += await client.gaps(server, model, tokens)
        return gaps

    streams = asyncio.gather(*map(stream, MIXED))
    arrivals = []
    for name in names:
        await asyncio.sleep(PACE)
        arrivals.append(asyncio.create_task(client.complete(server, name, 4, 2)))
    await asyncio.gather(*arrivals)
    over.set()
    gaps = sorted(itertools.chain.from_iterable(await streams))
    copies = await client.counter(server, "lora_plugin_loads_total")
    reads = await client.counter(server, "lora_plugin_load_seconds_count", stage="pack")
    return {
        "longest_ms": gaps[-1] * 1e3,
        "p99_ms": gaps[len(gaps) * 99 // 100] * 1e3,
        "median_ms": gaps[len(gaps) // 2] * 1e3,
        "copies": copies,
        "reads": reads,
    }


async def run(model: Path, work: Path, tokens: int) -> dict[str, dict[str, float]]:
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
    new = [write_adapter(model, work / f"n{i}", RANK, seed=10 + i) for i in range(ADAPTERS)]
    try:
        server.start()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=600)
        ) as session:
            client = Client(session, vocabulary_of(model))
            for name in MIXED:
                await client.complete(server, name, 4, 2)
            quiet = await turn(client, server, ["base"] * ADAPTERS, tokens)
            for folder in new:
                folder.rename(directory / folder.name)
            names = [folder.name for folder in new]
            for name in names:
                await client.listed(server, name)
            first = await turn(client, server, names, tokens)
            again = await turn(client, server, names, tokens)
            after = await turn(client, server, ["base"] * ADAPTERS, tokens)
    finally:
        server.stop()
    return {"quiet": quiet, "new": first, "again": again, "quiet again": after}


def table(turns: dict[str, dict[str, float]]) -> str:
    """As Markdown; copies and reads are those of the turn."""
    columns = ("longest ms", "99% ms", "median ms", "copies to the arena", "reads")
    lines = ["| turn | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    before = {"copies": len(MIXED) - 1.0, "reads": len(MIXED) - 1.0}
    for name, result in turns.items():
        times = [f"{result[key]:.0f}" for key in ("longest_ms", "p99_ms", "median_ms")]
        counts = [f"{result[key] - before[key]:.0f}" for key in before]
        lines.append(f"| {name} | " + " | ".join(times + counts) + " |")
        before = {key: result[key] for key in before}
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        turns = asyncio.run(run(arguments.model, Path(work), arguments.tokens))
    print(table(turns))
    result: dict[str, Any] = {"turns": turns, "date": date.today().isoformat(), "model": arguments.model.name}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
