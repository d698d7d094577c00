"""The host's other states with adapters in them: preemption, chunks, drafts, beams, reloads."""

from __future__ import annotations

import asyncio
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from server import BASE, Completion, Server, get
from tiny import logprobs, tokenizer

# vLLM 0.30's CPU build ends at the first greedy draft, without the plugin too: it never calls its CPU kernel.
DRAFTS = not version("vllm").startswith("0.30.")
_NGRAMS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
FLAGS = (
    *("--enforce-eager", "--max-loras", "2", "--max-lora-rank", "16"),
    *("--max-model-len", "512", "--max-num-batched-tokens", "64", "--max-num-seqs", "16"),
    # 640 tokens of KV cache: eight requests of 150 do not fit.
    *("--block-size", "32", "--num-gpu-blocks-override", "20"),
    *(("--speculative-config", _NGRAMS) if DRAFTS else ()),
)
ENV = {"VLLM_SERVER_DEV_MODE": "1", "LORA_PLUGIN_MAX_WAIT_SECONDS": "1"}
NAMES = (BASE, "alpha", "beta", "gamma", "delta")


@pytest.fixture(scope="module", autouse=True)
def _all_there(server: Server, sources: dict[str, Path]) -> None:
    for name, folder in sources.items():
        server.drop(folder, name)
        server.wait_listed(name)


@pytest.fixture
def check(model: Path, sources: dict[str, Path]) -> Any:
    """Whether an answer is that of transformers with PEFT."""

    def compare(name: str, answer: Completion) -> None:
        expected = logprobs(model, sources.get(name), answer.prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=5e-4), name

    return compare


@pytest.fixture(autouse=True)
def _right_afterwards(server: Server, prompt: list[int], check: Any) -> Any:
    """Whatever happened, the next requests are answered as ever."""
    yield
    for name in NAMES:
        check(name, server.complete(name, prompt, 6))


def counter(server: Server, name: str) -> float:
    """A total of the host's metrics."""
    text = get(f"{server.url}/metrics")[1].decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def test_preempted_requests_keep_their_adapter(server: Server, prompt: list[int], check: Any) -> None:
    """More than the KV cache and the slabs hold, begun at once."""
    names = [NAMES[i % len(NAMES)] for i in range(10)]
    before = counter(server, "vllm:num_preemptions_total")

    async def together() -> list[Completion]:
        return await asyncio.gather(*(server.complete_async(name, prompt, 130) for name in names))

    for name, answer in zip(names, asyncio.run(together()), strict=True):
        assert len(answer.output) == 130
        check(name, answer)
    assert counter(server, "vllm:num_preemptions_total") > before


def test_prompts_in_chunks_beside_decoding(server: Server, prompt: list[int], check: Any) -> None:
    """300 tokens, 64 a step; the second time most of them come from the prefix cache."""
    long = tokenizer().encode("It was a dark and stormy night; the rain fell in torrents. " * 5)

    async def together() -> list[Completion]:
        asked = [(name, p, n) for name in NAMES[1:3] for p, n in ((long, 8), (prompt, 40))]
        answers = await asyncio.gather(*(server.complete_async(name, p, n) for name, p, n in asked))
        for (name, _, _), answer in zip(asked, answers, strict=True):
            check(name, answer)
        return answers

    for _ in range(2):
        asyncio.run(together())


@pytest.mark.skipif(not DRAFTS, reason="vLLM 0.30's CPU build ends at a greedy draft")
def test_drafts_are_judged_by_the_adapter(server: Server, check: Any) -> None:
    """A prompt that repeats itself gets drafts; what is accepted is the adapter's own choice."""
    before = counter(server, "vllm:spec_decode_num_draft_tokens_total")
    repeated = tokenizer().encode("one two three one two three one two three one two")
    for name in NAMES:
        check(name, server.complete(name, repeated, 40))
    assert counter(server, "vllm:spec_decode_num_draft_tokens_total") > before


def greedy_choice(model: Path, adapter: Path | None, prompt: list[int], choices: list[str]) -> str:
    """What is left of the choices when each token is the likeliest that one of them allows, by PEFT."""
    left, at = [tokenizer().encode(choice) for choice in choices], 0
    while len(left) > 1:
        done = left[0][:at]
        likely = {
            token: logprobs(model, adapter, [*prompt, *done], [token])[0]
            for token in {each[at] for each in left}
        }
        left = [each for each in left if likely[each[at]] == max(likely.values())]
        at += 1
    answer: str = tokenizer().decode(left[0])
    return answer


def test_structured_output_of_an_adapter_with_drafts(
    server: Server, model: Path, sources: dict[str, Path]
) -> None:
    choices = ["one two three", "one two one", "three one two", "two two three", "three two one"]
    prompt = tokenizer().encode("one two three three two one two two three " * 2)
    before = counter(server, "vllm:spec_decode_num_draft_tokens_total")
    for name in NAMES:
        answer = server.client.completions.create(
            model=name,
            prompt=prompt,
            max_tokens=20,
            temperature=0,
            extra_body={"structured_outputs": {"choice": choices}},
        )
        assert answer.choices[0].text == greedy_choice(model, sources.get(name), prompt, choices), name
    drafted = counter(server, "vllm:spec_decode_num_draft_tokens_total") > before
    assert drafted is DRAFTS


def test_beams_of_an_adapter(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    """The best of two beams is at least as likely as the greedy answer, judged by PEFT."""
    for name in ("alpha", "gamma"):
        greedy = server.complete(name, prompt, 6)
        answer = server.client.completions.create(
            model=name,
            prompt=prompt,
            n=2,
            max_tokens=6,
            extra_body={"use_beam_search": True, "return_token_ids": True, "ignore_eos": True},
        )
        tokens = answer.choices[0].token_ids  # type: ignore[attr-defined]
        best = sum(logprobs(model, sources[name], prompt, tokens))
        assert best >= sum(greedy.logprobs) - 1e-3


def test_the_models_weights_are_read_again(server: Server, prompt: list[int], check: Any) -> None:
    before = server.complete("alpha", prompt, 8)
    status, body = get(f"{server.url}/collective_rpc", "POST", {"method": "reload_weights"})
    assert status == 200, body
    assert server.complete("alpha", prompt, 8).output == before.output


def test_a_reset_prefix_cache(server: Server, prompt: list[int]) -> None:
    before = server.complete("beta", prompt, 8)
    assert get(f"{server.url}/reset_prefix_cache", "POST")[0] == 200
    assert server.complete("beta", prompt, 8).output == before.output
