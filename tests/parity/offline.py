"""An engine in a process of its own: every adapter and the base model asked in one batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

TOKENS: Final = 8
_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def run_offline(
    model: Path,
    adapters: Sequence[str | None],
    prompts: Sequence[list[int]],
    max_rank: int,
    pools: bool,
    dtype: str,
    root: Path,
) -> list[dict[str, Any]]:
    """For each prompt and each adapter (None: the base model) tokens and logprobs, an embedding or a code."""
    question = json.dumps([str(model), list(adapters), list(prompts), max_rank, pools, dtype])
    result = subprocess.run(
        [sys.executable, __file__, question],
        env={**os.environ, **_ENVIRONMENT, "LORA_PLUGIN_ADAPTER_DIR": str(root / "watched")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stdout[-3000:] + result.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(lines[0].removeprefix("RESULT"))
    return answers


def main(
    model: str, adapters: list[str | None], prompts: list[list[int]], max_rank: int, pools: bool, dtype: str
) -> None:
    """Asks and prints."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    kinds: dict[str, Any] = {"runner": "pooling", "convert": "embed"} if pools else {}
    multimodal = "vision_config" in json.loads((Path(model) / "config.json").read_text())
    llm = LLM(
        model,
        enable_lora=True,
        max_loras=4,
        max_lora_rank=max_rank,
        enforce_eager=True,
        dtype=dtype,
        max_model_len=512,
        disable_log_stats=True,
        language_model_only=multimodal,
        **kinds,
    )
    ids = [path and LoRARequest(f"n{i}", i, path) for i, path in enumerate(adapters)]
    questions = [{"prompt_token_ids": prompt} for prompt in prompts for _ in adapters]
    requests = ids * len(prompts)
    if pools:
        outputs = llm.embed(questions, lora_request=requests, use_tqdm=False)
        # An empty one stands for a refusal, which `embed` has no words for.
        vectors = [list(output.outputs.embedding) for output in outputs]
        answers = [{"embedding": vector} if vector else {"refusal": None} for vector in vectors]
    else:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
        outputs = llm.generate(questions, params, lora_request=requests, use_tqdm=False)
        answers = [_answer(output.outputs[0]) for output in outputs]
    print("RESULT" + json.dumps(answers))


def _answer(output: Any) -> dict[str, Any]:
    if output.finish_reason == "error":
        return {"refusal": json.loads(str(output.stop_reason).partition(":")[2])["code"]}
    tokens = list(output.token_ids)
    steps = zip(output.logprobs, tokens, strict=True)
    return {"tokens": tokens, "logprobs": [step[token].logprob for step, token in steps]}


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
