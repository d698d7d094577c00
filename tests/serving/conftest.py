"""Real servers over a tiny model; one per module of tests, adapters made once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Folders are spoiled as in the adapter tests.
sys.path.append(str(Path(__file__).parents[1] / "adapter"))

from server import Server
from tiny import make_adapter, make_model, tokenizer

RANKS = {"alpha": 8, "beta": 5, "gamma": 16, "delta": 1}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def sources(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of different ranks, outside every watched directory."""
    root = tmp_path_factory.mktemp("sources")
    return {
        name: make_adapter(root / name, model, seed=seed, rank=rank)
        for seed, (name, rank) in enumerate(RANKS.items(), start=1)
    }


@pytest.fixture(scope="session")
def prompt() -> list[int]:
    """Some 20 tokens."""
    ids: list[int] = tokenizer().encode("The quick brown fox")
    return ids


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server over an empty watched directory; a module's FLAGS and ENV are passed on."""
    root = tmp_path_factory.mktemp(request.module.__name__)
    adapters = root / "adapters"
    adapters.mkdir()
    flags = getattr(request.module, "FLAGS", ())
    running = Server(model, adapters, root / "server.log", flags, getattr(request.module, "ENV", {}))
    prepare = getattr(request.module, "prepare", None)
    if prepare is not None:
        prepare(running, request.getfixturevalue("sources"))
    try:
        yield running.start()
    finally:
        running.stop()
        # Shown by pytest when a test of the module failed.
        print(running.tail(80))
