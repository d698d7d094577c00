"""The loads of the serving benchmark: which requests, of which models."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from servers import BenchServer

RANKS = {"r8": 8, "r16": 16, "r32": 32} | {f"a{i}": (8, 16, 32)[i % 3] for i in range(13)}
LOADS = ("decode base", "decode mixed", "decode 16 adapters", "prefill base", "prefill one", "prefill mixed")
MIXED = ("base", "r8", "r16", "r32")


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

    async def token_times(self, server: BenchServer, model: str, tokens: int) -> list[float]:
        """When each token of one stream arrived, in seconds; without the first four."""
        body = {
            "model": model,
            "prompt": [100] * 16,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._session.post(f"{server.url}/v1/completions", json=body) as answer:
            times = [time.perf_counter() async for line in answer.content if line.startswith(b"data: {")]
        return times[4:]

    async def counter(self, server: BenchServer, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 where it is not exported yet."""
        async with self._session.get(f"{server.url}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
            samples = [s for family in families for s in family.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

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
    models = {"base": ("base",), "one": ("r16",), "mixed": MIXED, "16 adapters": tuple(RANKS)}[which]
    function = decode if kind == "decode" else prefill
    return lambda client, server: function(client, server, models if lora else ("base",) * len(models))
