"""Tokens per second of real vLLM servers on a CPU: without LoRA, with the host's LoRA, with the plugin.

All servers are up at the same time and take turns, each frozen while another is measured, so that a noisy
machine slows all of them; what is printed is the median of the rounds' ratios to the server without LoRA
(default flags, compiled).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import aiohttp
from loads import LOADS, RANKS, Client, load_of
from random_adapter import write_adapter
from servers import BenchServer

PLUGIN_FLAGS = ("--max-loras", "8")
HOST_FLAGS = ("--enable-lora", "--max-loras", "16", "--max-lora-rank", "64")
"""Room for all adapters at once: the plugin's slabs hold several of a low rank, the host's slots one each."""


async def measure(
    servers: Sequence[BenchServer], loads: Sequence[str], rounds: int, client: Client
) -> dict[str, dict[str, list[float]]]:
    """Per server and load: the tokens per second of every round."""
    results: dict[str, dict[str, list[float]]] = {s.name: {name: [] for name in loads} for s in servers}
    for number in range(rounds + 1):
        for name in loads:
            for server in servers:
                server.thaw()
                rate = await load_of(name, lora=server.name != "no LoRA")(client, server)
                server.freeze()
                # The first round warms up: adapters are loaded, products are planned.
                if number:
                    results[server.name][name].append(rate)
    return results


def summarise(results: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Median rate, and median of the rounds' ratios to the server without LoRA."""
    reference = results["no LoRA"]
    return {
        server: {
            name: {
                "tokens_per_second": statistics.median(rates),
                "ratio": statistics.median(a / b for a, b in zip(rates, reference[name], strict=True)),
            }
            for name, rates in loads.items()
        }
        for server, loads in results.items()
    }


def table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    """The ratios as a Markdown table."""
    names = next(iter(summary.values()))
    lines = ["| server | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for server, loads in summary.items():
        cells = [f"{loads[n]['ratio']:.2f} ({loads[n]['tokens_per_second']:.0f}/s)" for n in names]
        lines.append(f"| {server} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def make_servers(model: Path, work: Path, *, with_host: bool) -> list[BenchServer]:
    """Each with the adapters where it looks for them."""
    directory = work / "adapters"
    directory.mkdir()
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(model, directory / name, rank, seed=seed)
    plugin = {"LORA_PLUGIN_ADAPTER_DIR": str(directory), "LORA_PLUGIN_ADMIN_PORT": "0"}
    servers = [
        BenchServer("no LoRA", model, work / "none.log"),
        BenchServer("plugin", model, work / "plugin.log", PLUGIN_FLAGS, plugin),
    ]
    if with_host:
        flags = (*HOST_FLAGS, "--lora-modules")
        modules = tuple(f"{name}={directory / name}" for name in RANKS)
        servers.append(BenchServer("host's LoRA", model, work / "host.log", flags + modules))
    return servers


def vocabulary_of(model: Path) -> int:
    size: int = json.loads((model / "config.json").read_text())["vocab_size"]
    return size


async def run(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    servers = make_servers(arguments.model, work, with_host=not arguments.no_host)
    try:
        for server in servers:
            server.start()
            server.freeze()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(total=600)
        ) as session:
            client = Client(session, vocabulary_of(arguments.model))
            results = await measure(servers, arguments.loads, arguments.rounds, client)
    finally:
        for server in servers:
            server.stop()
    return {"ratios": summarise(results), "rounds": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loads", nargs="+", default=LOADS, choices=LOADS)
    parser.add_argument("--no-host", action="store_true", help="leave out the host's own LoRA")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        result = asyncio.run(run(arguments, Path(work)))
    result |= {"date": date.today().isoformat(), "machine": f"{platform.machine()}, {arguments.model.name}"}
    print(table(result["ratios"]))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
