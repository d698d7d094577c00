"""What the API server's line to its engines sends, with engines that write it down."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lora_plugin.hosts.vllm.link import EngineLink
from lora_plugin.readiness.staging import StageSpec

SPEC = StageSpec(7, "sql", "d", "/adapters/sql", 100, soon=True)


@pytest.mark.parametrize("engines", [1, 2])
async def test_only_an_engine_that_gets_the_request_makes_room_for_it(engines: int) -> None:
    asked: list[dict[str, object]] = []

    async def call(method: str, command: str, text: str, *, engine: int) -> str:
        assert (method, command) == ("lora_plugin_call", "stage")
        (adapter,) = json.loads(text)["adapters"]
        asked.append(adapter)
        return json.dumps({"result": {"7": {"state": "ready"}}})

    core = SimpleNamespace(core_engines=list(range(engines)), _call_utility_async=call)
    statuses = await EngineLink(SimpleNamespace(engine_core=core)).stage([SPEC])
    assert statuses[7].state == "ready"
    assert [adapter["soon"] for adapter in asked] == [engines == 1] * engines
