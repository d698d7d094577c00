"""A sequence classifier: its adapters come with the head that they were trained with."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from server import BASE, Server, get
from tiny import class_logits, make_classifier, make_classifier_adapter, tokenizer

FLAGS = ("--enforce-eager", "--max-loras", "2", "--max-lora-rank", "16", "--max-num-batched-tokens", "64")
TEXTS = ("The quick brown fox", "It was a dark and stormy night; the rain fell in torrents. " * 3, "no")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier") / "tiny", labels=3)


@pytest.fixture(scope="module")
def folders(model: Path, server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    made = {f"c{seed}": make_classifier_adapter(root / f"c{seed}", model, seed=seed) for seed in (1, 2, 3)}
    for name, folder in made.items():
        server.drop(folder, name)
        server.wait_listed(name)
    return made


def classify(server: Server, name: str, text: str) -> list[float]:
    status, body = get(f"{server.url}/classify", "POST", {"model": name, "input": text})
    assert status == 200, body
    probabilities: list[float] = json.loads(body)["data"][0]["probs"]
    return probabilities


def test_every_request_has_its_own_head(server: Server, model: Path, folders: dict[str, Path]) -> None:
    """Base and adapters in the same steps, long prompts in chunks."""
    asked = [(name, text) for name in (BASE, *folders) for text in TEXTS]

    async def together() -> list[list[float]]:
        return await asyncio.gather(*(asyncio.to_thread(classify, server, *each) for each in asked))

    for (name, text), probabilities in zip(asked, asyncio.run(together()), strict=True):
        logits = class_logits(model, folders.get(name), tokenizer().encode(text))
        assert probabilities == pytest.approx(logits.softmax(0).tolist(), abs=2e-5), (name, text)


def test_a_head_of_other_labels_is_refused(server: Server, tmp_path: Path) -> None:
    other = make_classifier(tmp_path / "other", labels=5)
    server.drop(make_classifier_adapter(tmp_path / "five", other, seed=9), "five")
    server.wait_for(lambda: server.admin("/v1/adapters/five")[1].get("state") == "rejected", 10, "a refusal")
    status, body = get(f"{server.url}/classify", "POST", {"model": "five", "input": "x"})
    assert status == 400
    assert b"score.weight" in body
