"""Every hook on the real server, compiled: a plugin that takes part, and one that fails in every hook."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest
from plugins.recorder import ALONE, DOUBLED
from safetensors.torch import load_file, save_file
from server import BASE, Server, completion_request, get
from tiny import logprobs, make_adapter

from lora_plugin.hooks import specs

FLAGS = ("--max-loras", "1", "--max-lora-rank", "16")
ENV = {
    "LORA_PLUGIN_HOOKS": "broken,recorder",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "plugins"), os.environ["PYTHONPATH"]]),
}


def prepare(server: Server, sources: dict[str, Path]) -> None:
    for name in ("alpha", "beta", "gamma", "delta"):
        server.drop(sources[name], name)
    shutil.copytree(sources["gamma"], server.adapters.parent / "store" / "stored")


def recorded(server: Server, hook: str) -> list[dict[str, Any]]:
    """What the recorder saw in a hook, per process in order."""
    files = sorted((server.adapters.parent / "record").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line["hook"] == hook]


def seen(server: Server, hook: str, fact: str) -> set[Any]:
    return {line[fact] for line in recorded(server, hook)}


@pytest.fixture(scope="module")
def doubled(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The adapters as the recorder has one layer computed: twice its share."""
    root = tmp_path_factory.mktemp("doubled")
    for name, source in sources.items():
        shutil.copytree(source, root / name)
        weights = load_file(root / name / "adapter_model.safetensors")
        weights[f"base_model.model.{DOUBLED}.lora_B.weight"] *= 2
        save_file(weights, root / name / "adapter_model.safetensors", metadata={"format": "pt"})
    return {name: root / name for name in sources}


def test_the_answer_to_make_linear_is_what_a_compiled_model_computes(
    server: Server, model: Path, doubled: dict[str, Path], prompt: list[int]
) -> None:
    assert "'mode': <CompilationMode.DYNAMO_TRACE_ONCE" in server.log.read_text()
    for name in (BASE, "alpha", "beta"):
        answer = server.complete(name, prompt)
        expected = logprobs(model, doubled.get(name), prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=1e-3), name
    assert DOUBLED in seen(server, "make_linear", "name")


def test_an_observer_sees_the_rows_of_every_step_with_adapters(server: Server, prompt: list[int]) -> None:
    before = len(recorded(server, "linear_observer"))
    server.complete("alpha", prompt, 4)
    lines = recorded(server, "linear_observer")[before:]
    assert [(line["y"], line["x"]) for line in lines] == [
        ([rows, 256], [rows, 512]) for rows in (len(prompt), 1, 1, 1)
    ]


def test_a_batch_is_told_by_names(server: Server, prompt: list[int]) -> None:
    before = len(recorded(server, "batch_built"))

    async def ours() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", default_headers={"X-Team": "us"}
        ) as client:
            # Both are loaded already when the four requests come.
            for name in ("alpha", "delta"):
                await client.completions.create(**completion_request(name, prompt, 1))
            await asyncio.gather(
                *(
                    client.completions.create(**completion_request(name, prompt, 400))
                    for name in ("alpha", BASE, "delta", BASE)
                )
            )

    asyncio.run(ours())
    batches = recorded(server, "batch_built")[before:]
    full = [batch for batch in batches if len(batch["index"]) == 4]
    assert full
    for batch in full:
        assert sorted(batch["adapters"]) == ["alpha", "delta"]
        assert sorted(batch["index"]) == [-1, -1, 0, 1]
        assert batch["index"][batch["index"].index(0) :].count(0) == 1
    assert any(sum(batch["tokens"]) == 4 for batch in full)


def test_admission_keeps_requests_apart_and_loses_none(server: Server, prompt: list[int]) -> None:
    before = len(recorded(server, "batch_built"))
    alone = server.complete(ALONE, prompt, 6).output

    async def together() -> list[Any]:
        return await asyncio.gather(*(server.complete_async(ALONE, prompt, 6) for _ in range(4)))

    assert [answer.output for answer in asyncio.run(together())] == [alone] * 4
    rows = [
        sum(place >= 0 and batch["adapters"][place] == ALONE for place in batch["index"])
        for batch in recorded(server, "batch_built")[before:]
    ]
    assert max(rows) == 1
    waiting = [line for line in recorded(server, "admit") if line["adapter"] == ALONE]
    assert {line["tokens"] for line in waiting} == {len(prompt)}


def ask(server: Server, name: str, prompt: list[int], **headers: str) -> openai.types.Completion:
    return server.client.completions.create(
        model=name, prompt=prompt, max_tokens=2, temperature=0, extra_headers=headers
    )


def test_a_plugins_selection_wins_over_what_the_request_says(server: Server, prompt: list[int]) -> None:
    answer = server.client.completions.with_raw_response.create(
        **completion_request("beta", prompt, 12), extra_headers={"X-Pick": "alpha"}
    )
    assert answer.headers["x-lora-adapter"].startswith("alpha@")
    assert answer.parse().choices[0].token_ids == server.complete("alpha", prompt).output


def test_a_new_name_is_no_way_round_access_control(server: Server, prompt: list[int]) -> None:
    load = f"{server.url}/v1/load_lora_adapter"
    for place in ("delta", f"{server.adapters}/beta/../delta"):
        status, answer = get(load, "POST", {"lora_name": "mine", "lora_path": place})
        assert (status, json.loads(answer)["error"]["message"]) == (403, "delta is ours [forbidden]")
    assert not (server.adapters / "mine").exists()
    assert get(load, "POST", {"lora_name": "other", "lora_path": "beta"})[0] == 200
    asked = [line for line in recorded(server, "authorize") if line["path"] == "/v1/load_lora_adapter"]
    assert [line["adapter"] for line in asked] == ["delta", "delta", "beta"]
    (server.adapters / "other").unlink()
    server.wait_gone("other")


def test_a_header_that_is_repeated_names_neither(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"model": BASE, "prompt": "a", "max_tokens": 1})
    connection.putrequest("POST", "/v1/completions")
    fields = ("Content-Type", "application/json"), ("Content-Length", len(body))
    for name, value in (*fields, ("X-LoRA-Adapter", "alpha"), ("X-LoRA-Adapter", "beta")):
        connection.putheader(name, value)
    connection.endheaders(body.encode())
    answer = connection.getresponse()
    assert (answer.status, "alpha, beta" in answer.read().decode()) == (404, True)
    connection.close()


def test_access_is_the_plugins_to_give(server: Server, prompt: list[int]) -> None:
    before = len(recorded(server, "authorize"))
    with pytest.raises(openai.PermissionDeniedError, match="delta is ours"):
        ask(server, "delta", prompt)
    assert ask(server, "delta", prompt, **{"X-Team": "us"}).choices
    body = {"model": "delta", "messages": [{"role": "user", "content": "hi"}]}
    assert get(f"{server.url}/tokenize", "POST", body)[0] == 403
    asked = recorded(server, "authorize")[before:]
    assert {line["path"] for line in asked if line["adapter"] == "delta"} == {"/v1/completions", "/tokenize"}
    assert any("max_tokens" in line["fields"] for line in asked)
    assert BASE not in {line["adapter"] for line in asked}


def test_access_control_that_fails_lets_nobody_in(server: Server, prompt: list[int]) -> None:
    with pytest.raises(openai.InternalServerError, match="access control failed") as raised:
        ask(server, "gamma", prompt)
    assert raised.value.status_code == 503


def test_an_unknown_name_is_fetched_once(
    server: Server, model: Path, doubled: dict[str, Path], prompt: list[int]
) -> None:
    assert "stored" not in server.models()

    async def together() -> list[Any]:
        return await asyncio.gather(*(server.complete_async("stored", prompt, 4) for _ in range(5)))

    answers = asyncio.run(together())
    expected = logprobs(model, doubled["gamma"], prompt, answers[0].output)
    assert all(answer.logprobs == pytest.approx(expected, abs=1e-3) for answer in answers)
    assert [line["name"] for line in recorded(server, "resolve_source")].count("stored") == 1
    assert "stored" in server.models()
    with pytest.raises(openai.InternalServerError, match="could not be fetched") as raised:
        # Nobody knows it, but one who might have failed to look.
        server.complete("nowhere", prompt)
    assert raised.value.status_code == 503


def test_lifecycle(server: Server, model: Path, prompt: list[int], tmp_path: Path) -> None:
    wide = make_adapter(tmp_path / "wide", model, seed=7, rank=32)
    server.drop(wide, "wide")
    server.wait_for(lambda: bool(recorded(server, "adapter_rejected")), 10, "the rejection")
    (rejected,) = recorded(server, "adapter_rejected")
    assert (rejected["name"], "[rank-too-large]" in rejected["reason"]) == ("wide", True)
    # One slab of 16 rows: 16 put out whatever lies there.
    server.drop(make_adapter(tmp_path / "full", model, seed=8, rank=16), "full")
    server.wait_listed("full")
    server.complete("alpha", prompt, 2)
    server.complete("full", prompt, 2)
    activated, evicted = recorded(server, "adapter_activated"), recorded(server, "adapter_evicted")
    assert activated[-1]["name"] == "full"
    assert "alpha" in [line["name"] for line in evicted]
    assert all(len(line["version"]) == 64 for line in activated + evicted)
    shutil.rmtree(server.adapters / "full")
    server.wait_for(lambda: "full" in seen(server, "adapter_retired", "name"), 10, "the end of full")
    ready = seen(server, "adapter_ready", "name")
    assert {"alpha", "beta", "gamma", "delta", "stored", "full"} <= ready
    assert {"wide", *ready} <= seen(server, "adapter_discovered", "name")
    api, engine = seen(server, "adapter_ready", "pid"), seen(server, "adapter_activated", "pid")
    assert len(api) == len(engine) == 1
    assert api != engine


def test_metrics_and_routes_of_plugins(server: Server) -> None:
    assert server.admin("/x/recorder") == (200, {"from": "recorder"})
    _, body = get(f"http://127.0.0.1:{server.admin_port}/metrics")
    assert b"recorder_starts_total 1.0" in body
    assert b'lora_plugin_hook_failures_total{hook="adapter_ready",plugin="broken"}' in body


def test_a_failing_plugin_is_logged_once_per_hook_and_process(server: Server) -> None:
    log = server.log.read_text()
    for hook in (name for name in vars(specs) if hasattr(getattr(specs, name), "lora_plugin_spec")):
        assert log.count(f"plugin 'broken' failed in the hook '{hook}'") == 1, hook
