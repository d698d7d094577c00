"""One server, many adapters: every way to ask, each answer equal to transformers with PEFT."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from server import BASE, Server, get
from tiny import logprobs, make_adapter, tokenizer

FLAGS = ("--enforce-eager", "--max-loras", "4", "--max-lora-rank", "16")
WHOLE = ["embed_tokens", "lm_head"]
EVERYONE = (BASE, "alpha", "beta", "gamma", "delta")


def prepare(server: Server, sources: dict[str, Path]) -> None:
    """Two adapters are there before the server starts."""
    server.drop(sources["alpha"], "alpha")
    server.drop(sources["beta"], "beta")


@pytest.fixture(scope="module", autouse=True)
def _everyone(server: Server, sources: dict[str, Path]) -> None:
    # Healthy means that what was there at the start is listed.
    assert server.models() == [BASE, "alpha", "beta"]
    for name in ("gamma", "delta"):
        server.drop(sources[name], name)
        server.wait_listed(name)


def source(sources: dict[str, Path], name: str) -> Path | None:
    return sources.get(name)


@pytest.mark.parametrize("name", EVERYONE)
def test_alone_equals_peft(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int], name: str
) -> None:
    answer = server.complete(name, prompt)
    expected = logprobs(model, source(sources, name), prompt, answer.output)
    assert answer.logprobs == pytest.approx(expected, abs=2e-4)


def test_answers_differ(server: Server, prompt: list[int]) -> None:
    answers = {tuple(server.complete(name, prompt).output) for name in EVERYONE}
    assert len(answers) == len(EVERYONE)


def test_one_batch_of_base_and_adapters_equals_alone(server: Server, prompt: list[int]) -> None:
    """Different prompts and lengths, so that prefill and decode rows of several adapters share steps."""
    names = [EVERYONE[i % len(EVERYONE)] for i in range(15)]
    prompts = [prompt * (1 + i % 3) for i in range(len(names))]
    alone = [server.complete(name, p, 8 + i) for i, (name, p) in enumerate(zip(names, prompts, strict=True))]

    async def together() -> list[list[int]]:
        answers = await asyncio.gather(
            *(server.complete_async(n, p, 8 + i) for i, (n, p) in enumerate(zip(names, prompts, strict=True)))
        )
        return [answer.output for answer in answers]

    assert asyncio.run(together()) == [answer.output for answer in alone]


def test_chat_and_streaming(server: Server) -> None:
    messages: list = [{"role": "user", "content": "hello"}]
    for name in ("alpha", "beta"):
        whole = server.client.chat.completions.create(
            model=name, messages=messages, max_tokens=8, temperature=0
        )
        assert whole.model == name
        stream = server.client.chat.completions.create(
            model=name, messages=messages, max_tokens=8, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole.choices[0].message.content


def test_grammars_bind_adapters_too(server: Server, prompt: list[int]) -> None:
    """Structured output of every adapter, in one batch with free requests."""

    async def together() -> list:
        async with server.async_client as client:

            def ask(name: str, **extra: object) -> object:
                return client.completions.create(
                    model=name, prompt=prompt, max_tokens=12, temperature=0, extra_body=extra
                )

            bound = [ask(name, structured_outputs={"regex": "[a-d]{6}"}) for name in EVERYONE]
            return await asyncio.gather(*bound, *(ask(name) for name in EVERYONE))

    texts = [answer.choices[0].text for answer in asyncio.run(together())]
    bound, free = texts[: len(EVERYONE)], texts[len(EVERYONE) :]
    assert all(re.fullmatch("[a-d]{6}", text) for text in bound)
    assert len(set(bound)) > 1
    assert not any(re.fullmatch("[a-d]{6}", text) for text in free)


def test_responses(server: Server) -> None:
    texts = set()
    for name in EVERYONE:
        answer = server.client.responses.create(
            model=name, input="hello", max_output_tokens=16, temperature=0
        )
        assert answer.model == name
        texts.add(answer.output_text)
    assert len(texts) == len(EVERYONE)


def test_a_content_part_does_not_choose_an_adapter(server: Server) -> None:
    """The host looks for an adapter named after the part's type; base requests must stay base."""
    plain: list = [{"role": "user", "content": "hello"}]
    parts: list = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    answers = {
        server.client.chat.completions.create(model=BASE, messages=m, max_tokens=8, temperature=0)
        .choices[0]
        .message.content
        for m in (plain, parts)
    }
    assert len(answers) == 1


def test_tokenize_takes_an_adapters_name(server: Server) -> None:
    status, body = get(f"{server.url}/tokenize", "POST", {"model": "gamma", "prompt": "hello"})
    assert status == 200
    assert json.loads(body)["tokens"] == tokenizer().encode("hello")


def test_unknown_names_get_the_hosts_404(server: Server, prompt: list[int]) -> None:
    for name in ("nobody", "../alpha", "/etc", "alpha/../beta", "alpha/", ".", "a" * 500):
        with pytest.raises(openai.NotFoundError) as error:
            server.complete(name, prompt)
        assert error.value.body["type"] == "NotFoundError"  # type: ignore[index]
        status, _ = get(f"{server.url}/tokenize", "POST", {"model": name, "prompt": "hello"})
        assert status == 404


def test_a_rejected_adapter_says_why(server: Server, sources: dict[str, Path], prompt: list[int]) -> None:
    broken = server.drop(sources["alpha"], ".broken")
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "r": 4}))
    broken.rename(server.adapters / "broken")
    server.wait_for(lambda: server.admin("/v1/adapters/broken")[0] == 200, 10, "broken to be seen")
    server.wait_for(
        lambda: server.admin("/v1/adapters/broken")[1]["state"] == "rejected", 10, "broken to be rejected"
    )
    assert "broken" not in server.models()
    stored = server.admin("/v1/adapters/broken")[1]["reason"]
    assert stored["code"] == "rank-mismatch"
    with pytest.raises(openai.BadRequestError) as error:
        server.complete("broken", prompt)
    assert stored["message"] in error.value.message
    assert stored["hint"] in error.value.message
    assert str(server.adapters) not in error.value.message
    shutil.rmtree(server.adapters / "broken")


@pytest.mark.parametrize("name", ["text", "image", BASE])
def test_reserved_names_are_rejected(server: Server, sources: dict[str, Path], name: str) -> None:
    folder = server.drop(sources["beta"], name)
    try:
        server.wait_for(
            lambda: server.admin(f"/v1/adapters/{name}")[1].get("state") == "rejected", 10, f"{name} rejected"
        )
        assert server.admin(f"/v1/adapters/{name}")[1]["reason"]["code"] == "name-reserved"
        assert server.models().count(name) == (name == BASE)
    finally:
        shutil.rmtree(folder)


def test_the_hosts_own_load_endpoints_are_not_a_second_truth(server: Server) -> None:
    status, _ = get(
        f"{server.url}/v1/load_lora_adapter", "POST", {"lora_name": "x", "lora_path": str(server.adapters)}
    )
    assert status == 404


def test_prefill_of_many_tokens_and_prefix_cache_by_adapter(
    server: Server, model: Path, sources: dict[str, Path]
) -> None:
    """The second request of each reads the prefix cache; no one may read another's."""
    long = tokenizer().encode("It was a dark and stormy night. " * 12)
    for name in (*EVERYONE, *EVERYONE):
        answer = server.complete(name, long, 4)
        expected = logprobs(model, source(sources, name), long, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4)


def test_modules_saved_whole(server: Server, model: Path, prompt: list[int], tmp_path: Path) -> None:
    """Rows of embedding and lm_head that differ from the base model's are served, too many are counted."""
    rows = sorted({*prompt[:6], *range(40, 46)})
    few = save_rows(make_adapter(tmp_path / "few", model, seed=9, modules_to_save=WHOLE), rows)
    many = save_rows(make_adapter(tmp_path / "many", model, seed=9, modules_to_save=WHOLE), list(range(99)))
    for folder in (few, many):
        server.drop(folder, folder.name)
        server.wait_listed(folder.name)
    answer = server.complete("few", prompt)
    assert answer.logprobs == pytest.approx(logprobs(model, few, prompt, answer.output), abs=2e-4)
    plain = make_adapter(tmp_path / "plain", model, seed=9)
    assert answer.logprobs != pytest.approx(logprobs(model, plain, prompt, answer.output), abs=0.05)
    with pytest.raises(openai.BadRequestError, match="99 of 259 rows differ"):
        server.complete("many", prompt)


def save_rows(folder: Path, rows: list[int]) -> Path:
    """Rows of the modules that were saved whole are changed."""
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for module in WHOLE:
        key = next(key for key in tensors if key.endswith(f".{module}.weight"))
        tensors[key][rows] += 0.1 * torch.randn(len(rows), tensors[key].shape[1])
    save_file(tensors, path)
    return folder


@pytest.mark.parametrize("stream", [False, True])
def test_the_response_says_what_was_served(server: Server, prompt: list[int], stream: bool) -> None:
    """The adapter and its version, or the base model; nothing where no model ran."""
    version = server.admin("/v1/adapters/alpha")[1]["version"]
    create = server.client.completions.with_raw_response.create
    for name, expected in (("alpha", f"alpha@{version[:12]}"), (BASE, "base")):
        answer = create(model=name, prompt=prompt, max_tokens=2, stream=stream)
        assert answer.headers["x-lora-adapter"] == expected
    for path, body in (
        ("/tokenize", {"model": "alpha", "prompt": "hello"}),
        ("/v1/completions", {"model": "?"}),
    ):
        request = urllib.request.Request(
            server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            headers = urllib.request.urlopen(request).headers
        except urllib.error.HTTPError as error:
            headers = error.headers
        assert "x-lora-adapter" not in headers
