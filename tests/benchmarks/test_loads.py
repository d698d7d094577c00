"""The serving benchmark's loads, against a server that only writes down what it is asked."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
loads = pytest.importorskip("loads")

EXPECTED = {
    "decode base": {"base": 8},
    "decode mixed": {"base": 2, "r8": 2, "r16": 2, "r32": 2},
    "decode 16 adapters": dict.fromkeys(loads.RANKS, 1),
    "prefill base": {"base": 8},
    "prefill one": {"r16": 8},
    "prefill mixed": {"base": 2, "r8": 2, "r16": 2, "r32": 2},
}


async def asked(name: str, *, lora: bool) -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({})

    application = web.Application()
    application.router.add_post("/v1/completions", complete)
    async with TestServer(application) as server, ClientSession() as session:
        target = SimpleNamespace(name="fake", url=str(server.make_url("")).rstrip("/"))
        assert await loads.load_of(name, lora=lora)(loads.Client(session, 1024), target) > 0
    return bodies


@pytest.mark.parametrize("name", loads.LOADS)
async def test_each_load_asks_for_its_models(name: str) -> None:
    bodies = await asked(name, lora=True)
    assert Counter(body["model"] for body in bodies) == EXPECTED[name]
    kind = name.split()[0]
    for body in bodies:
        assert (len(body["prompt"]), body["max_tokens"]) == {"decode": (16, 96), "prefill": (200, 1)}[kind]
        assert all(0 <= token < 1024 for token in body["prompt"])


async def test_without_lora_the_base_answers_as_many() -> None:
    bodies = await asked("decode 16 adapters", lora=False)
    assert Counter(body["model"] for body in bodies) == {"base": 16}
    assert len(loads.RANKS) == 16
