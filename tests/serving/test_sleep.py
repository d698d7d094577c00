"""Sleep, waking up and new base weights, with adapters in them and right afterwards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server import BASE, Completion, Server, get
from tiny import logprobs, make_adapter, make_model

FLAGS = (
    *("--enforce-eager", "--max-loras", "2", "--max-lora-rank", "16", "--max-model-len", "512"),
    *("--worker-extension-cls", "forgetful.Forgetful"),
)
ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "plugins"), os.environ["PYTHONPATH"]]),
}


@pytest.fixture(scope="module")
def folders(
    sources: dict[str, Path], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Two that know nothing of the base weights, two that are made of them."""
    root = tmp_path_factory.mktemp("relative")
    dora = make_adapter(root / "dora", model, seed=11, use_dora=True)
    tokens = make_adapter(root / "tokens", model, seed=12, trainable_token_indices=list(b"The quick"))
    return {"alpha": sources["alpha"], "gamma": sources["gamma"], "dora": dora, "tokens": tokens}


@pytest.fixture(scope="module", autouse=True)
def _all_there(server: Server, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        server.drop(folder, name)
        server.wait_listed(name)


@pytest.fixture
def check(model: Path, folders: dict[str, Path]) -> Any:
    """Whether an answer is that of transformers with PEFT, over the server's model or another."""

    def compare(name: str, answer: Completion, base: Path = model) -> None:
        expected = logprobs(base, folders.get(name), answer.prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=5e-4), name

    return compare


def post(server: Server, path: str, body: Any = None) -> Any:
    status, answer = get(f"{server.url}{path}", "POST", body)
    assert status == 200, answer
    return answer


def rpc(server: Server, method: str, **kwargs: str) -> None:
    post(server, "/collective_rpc", {"method": method, "kwargs": kwargs})


def fall_asleep(server: Server, level: int, mode: str = "abort") -> None:
    post(server, f"/sleep?level={level}&mode={mode}")
    assert b"true" in get(f"{server.url}/is_sleeping")[1]
    if level == 2:
        rpc(server, "lose_adapters")


@pytest.mark.parametrize("level", [1, 2])
def test_every_adapter_is_as_before(server: Server, prompt: list[int], check: Any, level: int) -> None:
    names = (BASE, "alpha", "gamma", "dora", "tokens")
    before = {name: server.complete(name, prompt, 8) for name in names}
    assert server.admin("/v1/adapters/gamma/pin", "POST")[0] == 200
    fall_asleep(server, level)
    post(server, "/wake_up")
    for name in names:
        after = server.complete(name, prompt, 8)
        assert after.output == before[name].output
        check(name, after)
    assert server.admin("/v1/adapters/gamma/unpin", "POST")[0] == 200


@pytest.mark.parametrize("name", ["alpha", "dora"])
def test_requests_kept_over_a_sleep(server: Server, prompt: list[int], check: Any, name: str) -> None:
    """One that runs and one that comes meanwhile, for an adapter that is only dropped then."""

    async def sleep_meanwhile() -> list[Completion]:
        running = asyncio.create_task(server.complete_async(name, prompt, 300))
        while not await begun(server):
            await asyncio.sleep(0.02)
        await asyncio.to_thread(fall_asleep, server, 2, "keep")
        coming = asyncio.create_task(server.complete_async("gamma", prompt, 8))
        await asyncio.sleep(0.5)
        assert not running.done()
        assert not coming.done()
        await asyncio.to_thread(post, server, "/wake_up")
        return [await running, await coming]

    first, second = asyncio.run(sleep_meanwhile())
    assert len(first.output) == 300
    check(name, first)
    check("gamma", second)


async def begun(server: Server) -> bool:
    """Whether a request runs."""
    text = await asyncio.to_thread(lambda: get(f"{server.url}/metrics")[1].decode())
    lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return any(float(line.split()[-1]) > 0 for line in lines)


def test_an_adapter_that_comes_while_the_engine_sleeps(
    server: Server, prompt: list[int], model: Path, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "late", model, seed=21, use_dora=True)
    fall_asleep(server, 2)
    server.drop(folder, "late")
    server.wait_listed("late")

    async def ask() -> Completion:
        coming = asyncio.create_task(server.complete_async("late", prompt, 8))
        await asyncio.sleep(0.5)
        assert not coming.done()
        await asyncio.to_thread(post, server, "/wake_up")
        return await coming

    answer = asyncio.run(ask())
    expected = logprobs(model, folder, prompt, answer.output)
    assert answer.logprobs == pytest.approx(expected, abs=5e-4)


@pytest.fixture
def other_model(server: Server, model: Path, tmp_path: Path) -> Iterator[Path]:
    """Another base model of the same shape; the first one comes back afterwards."""
    yield make_model(tmp_path / "other", seed=5)
    rpc(server, "reload_weights", weights_path=str(model))
    post(server, "/reset_prefix_cache")


def test_other_base_weights(server: Server, prompt: list[int], check: Any, other_model: Path) -> None:
    """What an adapter takes of the base weights is taken anew; a pin holds."""
    names = (BASE, "alpha", "dora", "tokens")
    for name in names:
        check(name, server.complete(name, prompt, 6))
    assert server.admin("/v1/adapters/dora/pin", "POST")[0] == 200
    rpc(server, "reload_weights", weights_path=str(other_model))
    post(server, "/reset_prefix_cache")
    for name in names:
        check(name, server.complete(name, prompt, 6), other_model)
    assert server.admin("/v1/adapters/dora")[1]["pinned"]


def test_the_first_base_weights_again(server: Server, prompt: list[int], check: Any) -> None:
    for name in (BASE, "alpha", "dora", "tokens"):
        check(name, server.complete(name, prompt, 6))
