"""Several processes: API servers, data-parallel engines, tensor-parallel ranks. One truth in all of them."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server import BASE, Server, get
from tiny import logprobs

sys.path.insert(0, str(Path(__file__).parents[1] / "hub"))

from local_hub import COMMIT, LocalHub, Repository

EAGER = ("--enforce-eager", "--max-loras", "2", "--max-lora-rank", "16")
LAYOUTS = {
    "two API servers over two ranks": (
        ("--api-server-count", "2", "--tensor-parallel-size", "2"),
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ),
    # With as many API servers, by the host's default.
    "two engines": (("--data-parallel-size", "2"), {}),
}
CONNECTIONS = 12
"""Each new connection goes to either API server: so many find both."""
EVERYONE = (BASE, "alpha", "beta", "gamma", "delta")


@pytest.fixture(scope="module")
def hub(sources: dict[str, Path]) -> Iterator[LocalHub]:
    files = {path.name: path.read_bytes() for path in sources["beta"].iterdir() if path.is_file()}
    with LocalHub({"org/poet": Repository(files)}) as running:
        yield running


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def server(
    request: pytest.FixtureRequest,
    model: Path,
    sources: dict[str, Path],
    hub: LocalHub,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    flags, env = LAYOUTS[request.param]
    root = tmp_path_factory.mktemp("processes")
    (root / "adapters").mkdir()
    env = {**env, "HF_ENDPOINT": hub.url, "HF_HOME": str(root / "hf"), "HF_HUB_OFFLINE": "0"}
    env["LORA_PLUGIN_HUB_ALLOW"] = "org/*"
    running = Server(model, root / "adapters", root / "server.log", (*EAGER, *flags), env)
    for name in EVERYONE[1:]:
        running.drop(sources[name], name)
    try:
        yield running.start()
    finally:
        running.stop()
        print(running.tail(80))


def ask(server: Server, model: str, prompt: list[int]) -> tuple[int, str | None]:
    """Status and served version over a connection of its own."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers["X-LoRA-Adapter"]
    except urllib.error.HTTPError as error:
        return error.code, None


def everywhere(server: Server, model: str, prompt: list[int]) -> set[tuple[int, str | None]]:
    return {ask(server, model, prompt) for _ in range(CONNECTIONS)}


def post(server: Server, action: str, **body: Any) -> tuple[int, str]:
    status, answer = get(f"{server.url}/v1/{action}_lora_adapter", "POST", body)
    return status, answer.decode()


def test_one_batch_of_base_and_adapters(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    names = EVERYONE * 3

    async def together() -> list:
        return await asyncio.gather(
            *(server.complete_async(name, prompt * (1 + i % 3), 6) for i, name in enumerate(names))
        )

    for name, answer in zip(names, asyncio.run(together()), strict=True):
        expected = logprobs(model, sources.get(name), answer.prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4), name


def test_an_engine_that_idles_keeps_its_adapters(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    """While one engine of two serves a request, the other makes dummy steps, adapters in its arena."""
    for name in (*EVERYONE, *EVERYONE):
        answer = server.complete(name, prompt, 10)
        expected = logprobs(model, sources.get(name), prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4), name


def test_an_update_reaches_every_process(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    folder = server.drop(sources["alpha"], "changing")
    server.wait_for(lambda: everywhere(server, "changing", prompt) != {(404, None)}, 10, "it to be served")
    ((status, before),) = everywhere(server, "changing", prompt)
    assert status == 200
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(sources["gamma"] / name, folder / name)
    server.wait_for(
        lambda: (200, before) not in everywhere(server, "changing", prompt), 10, "the new version"
    )
    assert len(everywhere(server, "changing", prompt)) == 1
    for _ in range(4):
        answer = asyncio.run(server.complete_async("changing", prompt, 6))
        expected = logprobs(model, sources["gamma"], prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4)
    shutil.rmtree(folder)
    server.wait_for(lambda: everywhere(server, "changing", prompt) == {(404, None)}, 10, "it to be gone")


def test_the_admin_endpoint_speaks_for_all(server: Server, prompt: list[int]) -> None:
    def residency() -> dict[str, int]:
        return server.admin("/v1/adapters/alpha")[1]["residency"]

    engines = len(server.admin("/v1/pool")[1]["engines"])
    assert engines == (2 if "--data-parallel-size" in server.flags else 1)
    assert server.admin("/v1/adapters/alpha/pin", "POST")[0] == 200
    assert residency() == {"disk": True, "host": engines, "device": engines, "engines": engines}
    assert server.admin("/v1/adapters/alpha/unpin", "POST")[0] == 200
    assert server.admin("/v1/adapters/alpha/evict", "POST")[0] == 200
    assert residency() == {"disk": True, "host": 0, "device": 0, "engines": engines}
    assert everywhere(server, "alpha", prompt) == {(200, f"alpha@{version(server, 'alpha')}")}


def version(server: Server, name: str) -> str:
    digest: str = server.admin(f"/v1/adapters/{name}")[1]["version"]
    return digest[:12]


def test_controllers_load_and_unload(server: Server, sources: dict[str, Path], prompt: list[int]) -> None:
    """As the host's own endpoints, with 200 for what is so already, and true in every API server."""
    path = str(server.adapters / "beta")
    for _ in range(2):
        assert post(server, "load", lora_name="beta", lora_path=path)[0] == 200
    assert post(server, "load", lora_name="verse", lora_path=path, load_inplace=True)[0] == 200
    assert {status for status, _ in everywhere(server, "verse", prompt)} == {200}

    assert post(server, "unload", lora_name="verse")[0] == 200
    assert post(server, "unload", lora_name="verse")[0] == 404
    server.wait_for(lambda: everywhere(server, "verse", prompt) == {(404, None)}, 10, "it to be unloaded")
    held = server.admin("/v1/adapters/verse")[1]
    assert held["state"] == "unloaded"
    # For a moment it is kept for requests that other API servers have already accepted.
    server.wait_for(lambda: _copies(server, "verse") == (0, 0), 10, "it to leave all memory")
    assert post(server, "load", lora_name="verse", lora_path=path)[0] == 200
    assert {status for status, _ in everywhere(server, "verse", prompt)} == {200}

    outside = str(sources["beta"])
    assert post(server, "load", lora_name="outside", lora_path=outside)[0] == 404
    assert post(server, "load", lora_name="alpha", lora_path=path)[0] == 400
    assert post(server, "load", lora_name=BASE, lora_path=path)[0] == 400
    assert post(server, "load", lora_name="", lora_path=path)[0] == 400
    assert post(server, "unload", lora_name="nobody")[0] == 404
    status, answer = post(server, "load", lora_name="x", lora_path=outside)
    error = json.loads(answer)["error"]
    assert (status, error["code"], error["type"]) == (404, 404, "NotFoundError")
    (server.adapters / "verse").unlink()


def _copies(server: Server, name: str) -> tuple[int, int]:
    residency = server.admin(f"/v1/adapters/{name}")[1]["residency"]
    return residency["host"], residency["device"]


def test_the_hub(server: Server, model: Path, sources: dict[str, Path], prompt: list[int]) -> None:
    """By a controller, by a file, and by the repository's own name."""
    assert post(server, "load", lora_name="poet", lora_path="org/poet")[0] == 200
    assert {status for status, _ in everywhere(server, "poet", prompt)} == {200}
    assert server.admin("/v1/adapters/poet")[1]["source"] == f"hub:org/poet@{COMMIT}"
    answer = server.complete("poet", prompt, 6)
    expected = logprobs(model, sources["beta"], prompt, answer.output)
    assert answer.logprobs == pytest.approx(expected, abs=2e-4)
    assert post(server, "load", lora_name="thief", lora_path="other/poet")[0] == 400

    (server.adapters / "poet.hub.yaml").rename(server.adapters / "bard.hub.yaml")
    server.wait_for(lambda: ask(server, "bard", prompt)[0] == 200, 20, "bard to be served")
    server.wait_for(lambda: everywhere(server, "poet", prompt) == {(404, None)}, 20, "poet to be gone")
    assert {status for status, _ in everywhere(server, "org/poet", prompt)} == {200}
    assert ask(server, "org--poet", prompt)[0] == 200
    for name in ("org/nothing", "other/poet", "/etc/passwd", "../poet"):
        assert ask(server, name, prompt)[0] == 404


def test_the_hosts_gauge_tells_the_truth_in_every_api_server(server: Server, prompt: list[int]) -> None:
    """Gateways read from it which adapters a server runs."""

    def series() -> list[str]:
        text = get(f"{server.url}/metrics")[1].decode()
        return [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]

    async def together() -> None:
        asks = [server.complete_async(name, prompt, 900) for name in ("alpha", "beta")]
        await asyncio.gather(*asks, asyncio.to_thread(watch))

    def watch() -> None:
        both = 'running_lora_adapters="alpha,beta"'
        server.wait_for(lambda: all(both in series()[0] for _ in range(CONNECTIONS)), 20, "both to run")

    asyncio.run(together())
    for _ in range(CONNECTIONS):
        (line,) = series()
        for label in ('max_lora="2"', 'waiting_lora_adapters=""', 'running_lora_adapters=""'):
            assert label in line
    assert "vllm:num_requests_running" in get(f"{server.url}/metrics")[1].decode()


def test_every_api_server_shows_all_metrics(server: Server, prompt: list[int]) -> None:
    """Whichever is asked: what engines count, and what each API server counts, summed up."""

    def scraped() -> dict[str, float]:
        # A connection of its own each time.
        text = get(f"{server.url}/metrics")[1].decode()
        samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        assert len({name for name, _ in samples}) == len(samples)
        return {name: float(value) for name, value in samples if name.startswith("lora_plugin")}

    requests, refused = 'requests_total{adapter="gamma"}', 'refused_requests_total{code="not-found"}'
    before = scraped()
    for _ in range(CONNECTIONS):
        assert ask(server, "gamma", prompt)[0] == 200
        assert ask(server, "nobody", prompt)[0] == 404
    own = get(f"http://127.0.0.1:{server.admin_port}/metrics")[1].decode()
    for samples in (scraped() for _ in range(CONNECTIONS)):
        assert samples["lora_plugin_up"] == 1
        for name in (requests, refused):
            count = samples[f"lora_plugin_{name}"]
            assert count - before.get(f"lora_plugin_{name}", 0) == CONNECTIONS
            assert f"lora_plugin_{name} {count}" in own.splitlines()
