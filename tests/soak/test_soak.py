"""Forty adapters through four slabs, sixteen clients, folders that change all the time, a kill in the middle.

`SOAK_SECONDS` says how long, `SOAK_SEED` what happens; `make soak` takes ten minutes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from clients import Answer, Clients, ask
from server import BASE, Server
from stock import Stock, make_contents
from tiny import logprobs, make_model, tokenizer

SECONDS = float(os.environ.get("SOAK_SECONDS", "24"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
FLAGS = ("--enforce-eager", "--max-loras", "4", "--max-lora-rank", "64")
# A third of the contents fit, so that host copies are evicted, too.
ENV = {"LORA_PLUGIN_HOST_MEMORY": "12MiB", "LORA_PLUGIN_MAX_WAIT_SECONDS": "2"}
TEXTS = ("The quick brown fox", "Once upon a time there was a")[: 1 if SECONDS < 60 else 2]
NAMES = 40
CLIENTS = 16

pytestmark = pytest.mark.timeout(SECONDS * 2 + 600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("soak")
    (root / "adapters").mkdir()
    running = Server(model, root / "adapters", root / "server.log", FLAGS, ENV)
    try:
        yield running.start()
    finally:
        running.stop()
        print(running.tail(120))


def _answer(server: Server, name: str, prompt: list[int]) -> Answer:
    answer = ask(server, name, prompt)
    assert answer is not None
    assert answer.status == 200, answer
    return answer


def memory(server: Server) -> int:
    """Bytes that the server's processes hold for themselves."""
    assert server.process is not None
    parent = psutil.Process(server.process.pid)
    return sum(process.memory_full_info().uss for process in (parent, *parent.children(recursive=True)))


def act(server: Server, stock: Stock, chance: random.Random) -> None:
    """One change, to one name."""
    name = chance.choice(list(stock.contents))

    def admin(path: str, method: str = "POST") -> Callable[[str], None]:
        def call(name: str) -> None:
            status, problem = server.admin(f"/v1/adapters/{name}{path}", method)
            assert status in (200, 400, 404, 409, 503), problem

        return call

    def unload(name: str) -> None:
        stock.touch(name, whole=False)
        admin(chance.choice(("", "?drain=abort", "?drain=0.2")), "DELETE")(name)

    def unpin_all(name: str) -> None:
        for other in stock.contents:
            admin("/unpin")(other)

    actions: list[tuple[float, Callable[[str], None]]] = [
        (4, stock.replace),
        (4, stock.overwrite),
        (2, stock.delete),
        (1, stock.cut),
        (1, stock.spoil),
        (1, stock.scribble),
        (2, admin("/evict")),
        (1, admin("/pin")),
        (0.3, unpin_all),
        (1, unload),
    ]
    weights, choices = zip(*actions, strict=True)
    chance.choices(choices, weights)[0](name)


def disturb(server: Server, stock: Stock, chance: random.Random, clients: Clients, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not clients.wrong:
        act(server, stock, chance)
        broken = [name for name, folder in stock.folders.items() if not folder.whole]
        if len(broken) > NAMES // 4:
            stock.replace(chance.choice(broken))
        time.sleep(chance.uniform(0.02, 0.2))
        assert server.healthy()


def test_soak(server: Server, model: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    prompts = [tokenizer().encode(text) for text in TEXTS]
    contents = make_contents(tmp_path, model, NAMES)
    stock = Stock(server.adapters, contents, chance)
    expected = solo_answers(server, model, contents, prompts)
    stock.fill()
    server.wait_for(lambda: len(server.models()) == NAMES + 1, 60, "all to be listed")
    clients = Clients(server, stock, expected, prompts, count=CLIENTS, seed=SEED)
    clients.start()
    try:
        disturb(server, stock, chance, clients, SECONDS / 3)
        before = memory(server)
        disturb(server, stock, chance, clients, SECONDS / 3)
        after = memory(server)
        clients.up.clear()
        server.kill()
        server.start()
        clients.up.set()
        disturb(server, stock, chance, clients, SECONDS / 3)
    finally:
        clients.stop()
    assert not clients.wrong, "\n".join(clients.wrong)
    print(f"soak: {dict(clients.seen)}, memory {before / 1e6:.0f} -> {after / 1e6:.0f} MB")
    assert clients.seen["answered"] > 4 * SECONDS
    # A leak of one adapter per request, or per change, would be far more.
    assert after - before < 64e6 + 0.05 * before
    all_is_well(server, stock, expected, prompts)


def solo_answers(
    server: Server, model: Path, contents: dict[str, list[Path]], prompts: list[list[int]]
) -> dict[tuple[str, int], Answer]:
    """Every content's answer to every prompt while nobody else asks; some are compared with PEFT's."""
    expected = {("", number): _answer(server, BASE, prompt) for number, prompt in enumerate(prompts)}
    for version in (0, 1):
        stock = Stock(
            server.adapters,
            {name: [folders[version]] for name, folders in contents.items()},
            random.Random(0),
        )
        stock.fill()
        server.wait_for(lambda: len(server.models()) == NAMES + 1, 60, "all to be listed")
        for position, (name, (folder,)) in enumerate(stock.contents.items()):
            for number, prompt in enumerate(prompts):
                answer = _answer(server, name, prompt)
                expected[answer.label.partition("@")[2], number] = answer
            if position % 20 == 0:
                truth = logprobs(model, folder, prompts[-1], answer.tokens)
                assert answer.logprobs == pytest.approx(truth, abs=5e-4)
        for name in stock.contents:
            stock.delete(name)
        server.wait_for(lambda: server.models() == [BASE], 20, "all to be gone")
    assert len(expected) == len(prompts) * (2 * NAMES + 1)
    return expected


def all_is_well(
    server: Server, stock: Stock, expected: dict[tuple[str, int], Answer], prompts: list[list[int]]
) -> None:
    """Once it is quiet: every name is served again, and rightly; nobody waits; nothing of the old is left."""
    for name in stock.contents:
        server.admin(f"/v1/adapters/{name}/unpin", "POST")
    stock.fill()
    server.wait_for(lambda: len(server.models()) == NAMES + 1, 60, "all to be listed")
    for name in stock.contents:
        answer = _answer(server, name, prompts[0])
        assert answer.equals(expected[answer.label.partition("@")[2], 0]), name
    (engine,) = server.admin("/v1/pool")[1]["engines"]
    assert engine["waiting_requests"] == 0
    assert engine["host_bytes"] <= engine["host_budget_bytes"]
    assert all(extent["requests"] == 0 for extent in engine["extents"])
    lines = server.log.read_text(errors="replace").splitlines()
    # vLLM logs the trace of every stream that ends with an error, such as that its adapter was lost.
    assert [line for line in lines if "Traceback" in line and "[serving.py:" not in line] == []
