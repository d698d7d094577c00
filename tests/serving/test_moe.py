"""A mixture-of-experts model: attention takes adapters, experts are refused, the base model answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from server import BASE, Server
from tiny import logprobs, make_adapter, make_moe

FLAGS = ("--enforce-eager", "--max-loras", "2", "--max-lora-rank", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe(tmp_path_factory.mktemp("moe") / "tiny")


@pytest.fixture(scope="module")
def attention(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    return make_adapter(tmp_path_factory.mktemp("a") / "attention", model, seed=5, rank=8, targets=targets)


def test_attention_adapters_beside_the_base_model(
    server: Server, model: Path, attention: Path, prompt: list[int]
) -> None:
    server.drop(attention, "attention")
    server.wait_listed("attention")
    names = [BASE, "attention"] * 3

    async def together() -> list:
        return await asyncio.gather(*(server.complete_async(name, prompt, 10) for name in names))

    for name, answer in zip(names, asyncio.run(together()), strict=True):
        expected = logprobs(model, None if name == BASE else attention, prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=1e-3), name


def test_expert_adapters_are_refused_by_name(
    server: Server, attention: Path, prompt: list[int], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(attention, tmp_path / "experts")
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {
        name.replace("self_attn.q_proj", "block_sparse_moe.experts.0.w1"): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "adapter_model.safetensors")
    server.drop(folder, "experts")
    server.wait_for(
        lambda: server.admin("/v1/adapters/experts")[1].get("state") == "rejected", 10, "experts refused"
    )
    reason = server.admin("/v1/adapters/experts")[1]["reason"]
    assert "expert" in json.dumps(reason)
    assert server.complete(BASE, prompt, 4).output
