"""The CPU's compile mode is kept, embedding and lm_head adapters are served, bfloat16 is served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from server import BASE, Server
from tiny import ALL_LINEAR, logprobs, make_adapter

FLAGS = ("--max-loras", "2", "--max-lora-rank", "16")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind of layer, patterns, rsLoRA, half precision."""
    root = tmp_path_factory.mktemp("kinds")
    kinds = {
        "linear": {"rank": 8},
        "vocabulary": {"rank": 4, "targets": ("embed_tokens", "lm_head", "q_proj")},
        "rslora": {"rank": 6, "use_rslora": True, "lora_alpha": 8, "dtype": torch.float16},
        "patterns": {
            "rank": 8,
            "rank_pattern": {"layers.1.mlp.down_proj": 2, "q_proj": 16},
            "alpha_pattern": {"k_proj": 24},
        },
        "partial": {"rank": 3, "targets": ("v_proj", "down_proj"), "dtype": torch.bfloat16},
    }
    return {
        name: make_adapter(root / name, model, seed=40 + i, **{"targets": ALL_LINEAR, **kind})
        for i, (name, kind) in enumerate(kinds.items())
    }


@pytest.fixture(scope="module", autouse=True)
def _served(server: Server, adapters: dict[str, Path]) -> None:
    for name, folder in adapters.items():
        server.drop(folder, name)
    for name in adapters:
        server.wait_listed(name)


def test_the_compile_mode_is_kept(server: Server) -> None:
    log = server.log.read_text()
    assert "'mode': <CompilationMode.DYNAMO_TRACE_ONCE" in log
    assert "Warming up model for the compilation" in log


def test_compiled_answers_equal_peft_in_one_batch(
    server: Server, model: Path, adapters: dict[str, Path], prompt: list[int]
) -> None:
    """The batch changes from step to step: nothing of it may be baked into the graph."""
    names = [BASE, *adapters] * 2

    async def together() -> list:
        return await asyncio.gather(
            *(server.complete_async(name, prompt * (1 + i % 4), 4 + i) for i, name in enumerate(names))
        )

    for name, answer in zip(names, asyncio.run(together()), strict=True):
        expected = logprobs(model, adapters.get(name), answer.prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=1e-3), name


def test_base_answers_are_the_same_beside_adapters_to_the_bit(server: Server, prompt: list[int]) -> None:
    alone = server.complete(BASE, prompt, 12)

    async def together() -> list:
        return await asyncio.gather(
            *(server.complete_async(n, prompt, 12) for n in ("linear", BASE, "vocabulary"))
        )

    assert asyncio.run(together())[1].output == alone.output
