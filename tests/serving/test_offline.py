"""`LLM(...)` without a server: a `LoRARequest` by path is staged on demand, a bad one ends alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import logprobs

_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
if __name__ == "__main__":
    model, prompt, adapters = json.loads(sys.argv[1])
    llm = LLM(model, enable_lora=True, max_loras=2, max_lora_rank=16, enforce_eager=True, dtype="float32",
              max_model_len=512, disable_log_stats=True)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    requests = [path and LoRARequest(f"n{i}", i + 1, path) for i, path in enumerate(adapters)]
    prompts = [{"prompt_token_ids": prompt}] * len(requests)
    answers = [o.outputs[0] for o in llm.generate(prompts, params, lora_request=requests, use_tqdm=False)]
    print("RESULT" + json.dumps([
        {"tokens": list(a.token_ids), "finish": a.finish_reason, "stop": a.stop_reason,
         "logprobs": [step[t].logprob for step, t in zip(a.logprobs or [], a.token_ids)]}
        for a in answers]))
"""


@pytest.fixture(scope="module")
def answers(
    model: Path, sources: dict[str, Path], prompt: list[int], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """In one batch: the base model, two adapters, a path that is not there, an adapter again."""
    root = tmp_path_factory.mktemp("offline")
    script = root / "offline.py"
    script.write_text(_SCRIPT)
    paths = [
        None,
        *(str(p) for p in (sources["alpha"], sources["gamma"], root / "missing", sources["alpha"])),
    ]
    quiet = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    result = subprocess.run(
        [sys.executable, str(script), json.dumps([str(model), prompt, paths])],
        env={**os.environ, **quiet, "LORA_PLUGIN_ADAPTER_DIR": str(root / "watched")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stdout[-3000:] + result.stderr[-3000:]
    decoded: list[dict[str, Any]] = json.loads(lines[0].removeprefix("RESULT"))
    return decoded


@pytest.mark.parametrize(("index", "name"), [(0, None), (1, "alpha"), (2, "gamma"), (4, "alpha")])
def test_each_answer_equals_peft(
    answers: list[dict[str, Any]],
    model: Path,
    sources: dict[str, Path],
    prompt: list[int],
    index: int,
    name: str | None,
) -> None:
    answer = answers[index]
    expected = logprobs(model, sources[name] if name else None, prompt, answer["tokens"])
    assert answer["logprobs"] == pytest.approx(expected, abs=2e-4)


def test_a_missing_path_ends_its_request_only(answers: list[dict[str, Any]]) -> None:
    assert answers[3]["tokens"] == []
    assert answers[3]["finish"] == "error"
    assert "not-found" in answers[3]["stop"]
