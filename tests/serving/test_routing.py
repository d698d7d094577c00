"""Every way to name an adapter, over HTTP: the answer, the header and the `model` say which one it was."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from server import BASE, Server, completion_request
from tiny import compose, logprobs

FLAGS = ("--enforce-eager", "--max-loras", "2", "--max-lora-rank", "32")
NAMES = ("alpha", "beta")


def prepare(server: Server, sources: dict[str, Path]) -> None:
    for name in NAMES:
        server.drop(sources[name], name)
    (server.adapters / "aliases.yaml").write_text("prod: alpha\n")


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def versions(server: Server, prompt: list[int]) -> dict[str, str]:
    """`name@version12` of each adapter."""
    for name in NAMES:
        server.complete(name, prompt)
    return {name: f"{name}@{server.admin(f'/v1/adapters/{name}')[1]['version'][:12]}" for name in NAMES}


def ask(http: httpx.Client, prompt: list[int], header: str | None = None, **body: Any) -> httpx.Response:
    request = {"model": BASE, "prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
    headers = {} if header is None else {"X-LoRA-Adapter": header}
    return http.post("/v1/completions", json=request, headers=headers)


def route_to(server: Server, text: str) -> None:
    """Replace the aliases, and wait until the server goes by them."""
    draft = server.adapters / ".aliases.yaml.tmp"
    mark = f"mark-{abs(hash(text))}"
    draft.write_text(f"{text}\n{mark}: base\n")
    draft.rename(server.adapters / "aliases.yaml")
    server.wait_listed(mark)


def test_every_way_of_naming(
    http: httpx.Client, prompt: list[int], versions: dict[str, str], server: Server
) -> None:
    alpha = versions["alpha"]
    expected = server.complete("alpha", prompt, 8).text
    said: list[dict[str, Any]] = [
        {"model": "alpha"},
        {"model": f"{BASE}:alpha"},
        {"model": alpha},
        {"model": alpha.upper().replace("ALPHA", "alpha")},
        {"lora_path": "alpha"},
        {"adapter_id": alpha[:13]},
        {"header": "alpha"},
        {"header": alpha, "lora_path": "alpha", "model": "alpha"},
        {"model": "prod"},
        {"lora_path": "prod"},
    ]
    for names in said:
        answer = ask(http, prompt, **names)
        assert answer.status_code == 200, names
        assert answer.headers["x-lora-adapter"] == alpha, names
        assert answer.json()["model"] == "alpha", names
        assert answer.json()["choices"][0]["text"] == expected, names


def test_base_means_the_base_model(http: httpx.Client, prompt: list[int], server: Server) -> None:
    expected = server.complete(BASE, prompt, 8).text
    for names in ({}, {"header": "base"}, {"lora_path": "base"}, {"adapter_id": None}, {"lora_path": ""}):
        answer = ask(http, prompt, **names)
        assert answer.headers["x-lora-adapter"] == "base"
        assert answer.json()["choices"][0]["text"] == expected


def test_refusals(http: httpx.Client, prompt: list[int], versions: dict[str, str], server: Server) -> None:
    conflict = ask(http, prompt, model="alpha", lora_path="beta")
    assert conflict.status_code == 400
    assert "'alpha' (model-name)" in conflict.text
    assert "'beta' (field-lora-path)" in conflict.text
    for names in (
        {"header": "nobody"},
        {"lora_path": "../beta"},
        {"lora_path": str(server.adapters / "alpha")},
        {"lora_path": ["alpha"]},
        {"adapter_id": 7},
        {"header": "alpha@0000000"},
        {"model": "alpha@0000000"},
        {"model": f"{BASE}:nobody"},
    ):
        answer = ask(http, prompt, **names)
        assert answer.status_code == 404, names
        assert answer.json()["error"]["type"] == "NotFoundError"
        assert "x-lora-adapter" not in answer.headers
    assert versions["alpha"][6:] in ask(http, prompt, model="alpha@0000000").text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 4}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
    ],
)
def test_every_endpoint_takes_fields_and_header(
    http: httpx.Client, versions: dict[str, str], path: str, body: dict[str, Any], stream: bool
) -> None:
    for fields, headers in (
        ({"lora_path": "beta"}, {}),
        ({"adapter_id": "beta"}, {}),
        ({}, {"X-LoRA-Adapter": "beta"}),
    ):
        answer = http.post(path, json={"model": BASE, **body, **fields, "stream": stream}, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-lora-adapter"] == versions["beta"]
        assert '"model":"beta"' in answer.text.replace(" ", "")


def test_tokenize_looks_names_up_and_loads_nothing(http: httpx.Client) -> None:
    for names, status in (({"lora_path": "beta"}, 200), ({"lora_path": "nobody"}, 404), ({}, 200)):
        answer = http.post("/tokenize", json={"model": BASE, "prompt": "hello", **names})
        assert answer.status_code == status
        assert "x-lora-adapter" not in answer.headers


def test_aliases_are_listed_and_a_bad_file_changes_nothing(
    server: Server, http: httpx.Client, prompt: list[int], versions: dict[str, str]
) -> None:
    assert "prod" in server.models()
    route_to(server, "prod: beta")
    assert ask(http, prompt, model="prod").headers["x-lora-adapter"] == versions["beta"]
    (server.adapters / "aliases.yaml").write_text("prod: [")

    def complaint() -> Any:
        files = server.admin("/v1/routing")[1]["files"]
        return next(file["reason"] for file in files if file["name"] == "aliases.yaml")

    server.wait_for(lambda: complaint() is not None, 10, "the bad file to be noticed")
    assert complaint()["code"] == "routing-invalid"
    metrics = httpx.get(f"http://127.0.0.1:{server.admin_port}/metrics").text
    assert 'lora_plugin_routing_file_valid{file="aliases.yaml"} 0.0' in metrics
    assert ask(http, prompt, model="prod").headers["x-lora-adapter"] == versions["beta"]
    route_to(server, "prod: alpha")
    assert complaint() is None


def test_a_split_sticks_and_falls_back_only_where_it_says_so(
    server: Server, http: httpx.Client, prompt: list[int], versions: dict[str, str]
) -> None:
    route_to(
        server,
        "canary: {to: {alpha: 50, beta: 50}, sticky: X-Tenant}\n"
        "brave: {to: nobody, fallback: base}\n"
        "strict: {nobody: 1}",
    )
    assert ask(http, prompt, model="brave").headers["x-lora-adapter"] == "base"
    assert ask(http, prompt, model="strict").status_code == 404

    def served(**names: Any) -> str:
        headers = {"X-Tenant": names.pop("tenant")} if "tenant" in names else {}
        body = {"model": "canary", "prompt": prompt, "max_tokens": 1, **names}
        return http.post("/v1/completions", json=body, headers=headers).headers["x-lora-adapter"]

    count = 60
    found = Counter(served(user=f"user {i}") for i in range(count))
    assert set(found) == set(versions.values())
    assert abs(found[versions["alpha"]] - count / 2) < 5 * math.sqrt(count / 4)
    for key in ("one", "two", "three"):
        assert len({served(user=key) for _ in range(3)} | {served(tenant=key, user="other")}) == 1


def test_an_alias_is_switched_under_load(server: Server, prompt: list[int], versions: dict[str, str]) -> None:
    """No request fails, and each answer is that of the adapter that its header names."""
    alone = {versions[name]: server.complete(name, prompt, 8).output for name in NAMES}
    route_to(server, "live: alpha")
    answers: list[tuple[str, list[int]]] = []
    done = asyncio.Event()

    async def client(http: httpx.AsyncClient) -> None:
        while not done.is_set():
            body = completion_request("live", prompt, 8)
            answer = await http.post("/v1/completions", json={**body, **body.pop("extra_body")})
            assert answer.status_code == 200, answer.text
            answers.append((answer.headers["x-lora-adapter"], answer.json()["choices"][0]["token_ids"]))

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            clients = [asyncio.create_task(client(http)) for _ in range(6)]
            for target in itertools.islice(itertools.cycle(("beta", "alpha")), 3):
                await asyncio.to_thread(route_to, server, f"live: {target}\n# {len(answers)}")
                await asyncio.sleep(0.3)
            done.set()
            await asyncio.gather(*clients)

    asyncio.run(run())
    assert {label for label, _ in answers} == set(alone)
    assert [pair for pair in answers if pair[1] != alone[pair[0]]] == []


def test_an_older_version_is_served_as_long_as_it_is_held(
    server: Server, sources: dict[str, Path], prompt: list[int], http: httpx.Client
) -> None:
    server.drop(sources["alpha"], "fresh")
    server.wait_listed("fresh")
    before = server.complete("fresh", prompt, 8)
    old = server.admin("/v1/adapters/fresh")[1]["version"]

    def is_new() -> bool:
        return ask(http, prompt, model="fresh").headers["x-lora-adapter"] != f"fresh@{old[:12]}"

    with http.stream(
        "POST",
        "/v1/completions",
        json={"model": "fresh", "prompt": prompt, "max_tokens": 900, "stream": True, "ignore_eos": True},
    ) as running:
        lines = running.iter_lines()
        next(lines)
        shutil.copytree(sources["beta"], server.adapters / ".fresh.new")
        (server.adapters / "fresh").rename(server.adapters / ".fresh.old")
        (server.adapters / ".fresh.new").rename(server.adapters / "fresh")
        server.wait_for(is_new, 20, "the new version")
        held = ask(http, prompt, model=f"fresh@{old[:7]}")
        assert held.status_code == 200, held.text
        assert held.headers["x-lora-adapter"] == f"fresh@{old[:12]}"
        assert held.json()["choices"][0]["text"] == before.text
    server.wait_for(
        lambda: ask(http, prompt, model=f"fresh@{old[:7]}").status_code == 404,
        20,
        "the old version to be gone",
    )


def test_a_composition_is_pefts(
    server: Server,
    model: Path,
    sources: dict[str, Path],
    prompt: list[int],
    tmp_path: Path,
    http: httpx.Client,
) -> None:
    """Named or spelled, in one batch with its parts and the base model; a new part is a new version."""
    (server.adapters / "compositions.yaml").write_text("mix: {alpha: 0.7, beta: -0.5}\n")
    server.wait_listed("mix")
    folder = compose(model, {sources["alpha"]: 0.7, sources["beta"]: -0.5}, tmp_path)
    for name in ("mix", "alpha*0.7+beta*-0.5"):
        answer = server.complete(name, prompt)
        assert answer.logprobs == pytest.approx(logprobs(model, folder, prompt, answer.output), abs=2e-4)
    names = ["mix", "alpha", BASE, "beta*-0.5+alpha*0.7", "beta"] * 2
    alone = [server.complete(name, prompt).output for name in names]

    async def together() -> list[list[int]]:
        answers = await asyncio.gather(*(server.complete_async(name, prompt) for name in names))
        return [answer.output for answer in answers]

    assert asyncio.run(together()) == alone
    label = ask(http, prompt, model="mix").headers["x-lora-adapter"]
    assert label.startswith("mix@")
    pool = server.admin("/v1/pool")[1]["engines"][0]["extents"]
    assert "mix" in {extent["adapter"] for extent in pool}
    (server.adapters / "compositions.yaml").write_text("mix: alpha+beta\n")
    server.wait_for(
        lambda: ask(http, prompt, model="mix").headers["x-lora-adapter"] != label, 10, "the new composition"
    )
    folder = compose(model, {sources["alpha"]: 1.0, sources["beta"]: 1.0}, tmp_path)
    answer = server.complete("mix", prompt)
    assert answer.logprobs == pytest.approx(logprobs(model, folder, prompt, answer.output), abs=2e-4)
    too_large = ask(http, prompt, model="alpha+alpha+alpha+alpha+alpha")
    assert too_large.status_code == 400
    assert "8 + 8 + 8 + 8 + 8 = 40" in too_large.text
    assert ask(http, prompt, model="alpha+nobody").status_code == 404


def test_explain(server: Server, sources: dict[str, Path], prompt: list[int]) -> None:
    """What is known of a name: where it is, what it changes, whose rows were in the last steps."""
    untrained = server.adapters / ".untrained"
    shutil.copytree(sources["alpha"], untrained)
    weights = load_file(untrained / "adapter_model.safetensors")
    save_file(
        {key: tensor * (0 if "lora_B" in key else 1) for key, tensor in weights.items()},
        untrained / "adapter_model.safetensors",
    )
    untrained.rename(server.adapters / "untrained")
    server.drop(sources["alpha"], "twin")
    for name in ("untrained", "twin"):
        server.wait_listed(name)
    for name in ("alpha", "untrained", "twin"):
        server.complete(name, prompt, 3)

    def explain(name: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
        status, view = server.admin(f"/v1/adapters/{name}/explain")
        assert status == 200, view
        problems = [f for f in view["findings"] if f["level"] == "problem"]
        return view, {f["question"]: f["text"] for f in problems}

    view, problems = explain("twin")
    assert view["layers"]["changed"] == view["layers"]["wrapped"] - len(view["layers"]["unchanged"])
    assert "alpha" in problems["alike"]
    engine = view["engines"][0]
    assert (engine["host"], engine["rows"]) == ("ready", 8)
    assert engine["steps"][-1] == [{"adapter": "twin", "requests": 1, "rows": 1}]
    assert "untrained" in explain("untrained")[1]["no-effect"]
    route_to(server, "prod: alpha\nnowhere: nobody")
    assert explain("prod")[0]["stands_for"] == [{"adapter": "alpha", "version": None, "weight": 1.0}]
    assert server.admin("/v1/adapters/nobody/explain")[0] == 404
    composed = server.complete("alpha*0.5", prompt, 2)
    assert composed.output
    assert explain("alpha*0.5")[0]["engines"][0]["rows"] == 8
