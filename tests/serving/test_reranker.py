"""A reranker, a classifier of one label: score and rerank with adapters and their heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server import BASE, Server, get
from tiny import class_logits, make_classifier, make_classifier_adapter, tokenizer

FLAGS = ("--enforce-eager", "--max-loras", "2", "--max-lora-rank", "16")
QUERY = "Which animal is quick?"
DOCUMENTS = ("The quick brown fox", "It was a dark and stormy night", "no")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("reranker") / "tiny", labels=1)


@pytest.fixture(scope="module")
def folders(model: Path, server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    made = {f"r{seed}": make_classifier_adapter(root / f"r{seed}", model, seed=seed) for seed in (1, 2)}
    for name, folder in made.items():
        server.drop(folder, name)
        server.wait_listed(name)
    return made


def ask(server: Server, path: str, **body: Any) -> Any:
    status, answer = get(f"{server.url}{path}", "POST", body)
    assert status == 200, answer
    return json.loads(answer)


def expected(model: Path, adapter: Path | None) -> list[float]:
    """The documents' scores."""
    pairs = [tokenizer()(QUERY, text_pair=document)["input_ids"] for document in DOCUMENTS]
    return [class_logits(model, adapter, pair).sigmoid().item() for pair in pairs]


@pytest.mark.parametrize("name", [BASE, "r1", "r2"])
def test_score(server: Server, model: Path, folders: dict[str, Path], name: str) -> None:
    answer = ask(server, "/score", model=name, text_1=QUERY, text_2=list(DOCUMENTS))
    scores = [each["score"] for each in answer["data"]]
    assert scores == pytest.approx(expected(model, folders.get(name)), abs=2e-5)


@pytest.mark.parametrize("name", [BASE, "r1", "r2"])
def test_rerank(server: Server, model: Path, folders: dict[str, Path], name: str) -> None:
    answer = ask(server, "/rerank", model=name, query=QUERY, documents=list(DOCUMENTS))
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    scores = expected(model, folders.get(name))
    assert [found[i] for i in range(len(DOCUMENTS))] == pytest.approx(scores, abs=2e-5)
    ranked = sorted(range(len(DOCUMENTS)), key=lambda i: -scores[i])
    assert [each["index"] for each in answer["results"]] == ranked
