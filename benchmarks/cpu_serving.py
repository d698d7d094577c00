"""Tokens per second of real vLLM servers on a CPU: without LoRA, with the host's LoRA, with the plugin.

All servers are up at the same time and take turns, each frozen while another is measured, so that a noisy
machine slows all of them; what is printed is the median of the rounds' ratios to the server without LoRA
(default flags, compiled).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import aiohttp
from random_adapter import write_adapter
from servers import BenchServer

RANKS = {"r8": 8, "r16": 16, "r32": 32} | {f"a{i}": (8, 16, 32)[i % 3] for i in range(13)}
LOADS = ("decode base", "decode mixed", "decode 16 adapters", "prefill base", "prefill one", "prefill mixed")
_MIXED = ("base", "r8", "r16", "r32")
PLUGIN_FLAGS = ("--max-loras", "8")
HOST_FLAGS = ("--enable-lora", "--max-loras", "16", "--max-lora-rank", "64")
"""Room for all adapters at once: the plugin's slabs hold several of a low rank, the host's slots one each."""


class Client:
    """Requests of random token ids; answers are not looked at, errors end the run."""

    def __init__(self, session: aiohttp.ClientSession, vocabulary: int) -> None:
        self._session, self._vocabulary = session, vocabulary

    async def complete(self, server: BenchServer, model: str, prompt_len: int, tokens: int) -> None:
        prompt = [random.randrange(100, self._vocabulary) for _ in range(prompt_len)]
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        async with self._session.post(f"{server.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"{server.name}: {answer.status} {await answer.text()}")
            await answer.read()

    async def gaps(self, server: BenchServer, model: str, tokens: int) -> list[float]:
        """Seconds between the tokens of one stream."""
        body = {
            "model": model,
            "prompt": [100] * 16,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._session.post(f"{server.url}/v1/completions", json=body) as answer:
            times = [time.perf_counter() async for line in answer.content if line.startswith(b"data: {")]
        return [b - a for a, b in itertools.pairwise(times[4:])]

    async def listed(self, server: BenchServer, name: str) -> None:
        """Wait until /v1/models names it."""
        while True:
            async with self._session.get(f"{server.url}/v1/models") as answer:
                if f'"{name}"' in await answer.text():
                    return
            await asyncio.sleep(0.05)


async def decode(client: Client, server: BenchServer, models: Sequence[str], tokens: int = 96) -> float:
    """Tokens per second of eight sequences, or of one for each of 16 adapters."""
    started, sequences = time.perf_counter(), max(8, len(models))
    names = itertools.islice(itertools.cycle(models), sequences)
    await asyncio.gather(*(client.complete(server, name, 16, tokens) for name in names))
    return sequences * tokens / (time.perf_counter() - started)


async def prefill(client: Client, server: BenchServer, models: Sequence[str]) -> float:
    """Prompt tokens per second of eight prompts of 200."""
    started = time.perf_counter()
    await asyncio.gather(*(client.complete(server, models[i % len(models)], 200, 1) for i in range(8)))
    return 8 * 200 / (time.perf_counter() - started)


def load_of(name: str, *, lora: bool) -> Callable[[Client, BenchServer], Awaitable[float]]:
    """A load as a function; a server without LoRA serves the base model in each."""
    kind, _, which = name.partition(" ")
    models = {"base": ("base",), "one": ("r16",), "mixed": _MIXED, "16 adapters": tuple(RANKS)}[which]
    function = decode if kind == "decode" else prefill
    return lambda client, server: function(client, server, models if lora else ("base",) * len(models))


async def measure(
    servers: Sequence[BenchServer], rounds: int, client: Client
) -> dict[str, dict[str, list[float]]]:
    """Per server and load: the tokens per second of every round."""
    results: dict[str, dict[str, list[float]]] = {s.name: {name: [] for name in LOADS} for s in servers}
    for number in range(rounds + 1):
        for name in LOADS:
            for server in servers:
                server.thaw()
                rate = await load_of(name, lora=server.name != "no LoRA")(client, server)
                server.freeze()
                # The first round warms up: adapters are loaded, products are planned.
                if number:
                    results[server.name][name].append(rate)
    return results


async def longest_gaps(
    server: BenchServer, model: Path, directory: Path, scratch: Path, client: Client
) -> dict[str, float]:
    """The longest gap of four streams, in milliseconds: quiet, and while new adapters are loaded.

    Six short requests arrive meanwhile in both cases, so that their prefills are in both; when loading, each
    is the first one of an adapter of rank 64 that was dropped a moment before.
    """

    async def streams(drop: Sequence[Path]) -> float:
        running = asyncio.gather(*(client.gaps(server, m, 160) for m in _MIXED))
        for i in range(6):
            await asyncio.sleep(0.5)
            name = "base"
            if drop:
                name = drop[i].name
                drop[i].rename(directory / name)
                await client.listed(server, name)
            await client.complete(server, name, 4, 2)
        return max(max(gaps) for gaps in await running) * 1e3

    quiet, loading = [], []
    for turn in range(3):
        new = [write_adapter(model, scratch / f"n{turn}{i}", 64, seed=9 * turn + i) for i in range(6)]
        quiet.append(await streams([]))
        loading.append(await streams(new))
    return {"quiet": statistics.median(quiet), "loading": statistics.median(loading)}


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
    lines = ["| server | " + " | ".join(LOADS) + " |", "| --- |" + " --- |" * len(LOADS)]
    for server, loads in summary.items():
        cells = [f"{loads[n]['ratio']:.2f} ({loads[n]['tokens_per_second']:.0f}/s)" for n in LOADS]
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
            results = await measure(servers, arguments.rounds, client)
            servers[1].thaw()
            gaps = await longest_gaps(servers[1], arguments.model, work / "adapters", work / "new", client)
    finally:
        for server in servers:
            server.stop()
    return {"ratios": summarise(results), "rounds": results, "longest_gap_ms": gaps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-host", action="store_true", help="leave out the host's own LoRA")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        result = asyncio.run(run(arguments, Path(work)))
    result |= {"date": date.today().isoformat(), "machine": f"{platform.machine()}, {arguments.model.name}"}
    print(table(result["ratios"]))
    gaps = result["longest_gap_ms"]
    print(f"longest gap between tokens: {gaps['quiet']:.0f} ms quiet, {gaps['loading']:.0f} ms while loading")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
