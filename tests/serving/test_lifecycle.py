"""Adapters come, change and go while the server runs; no answer is wrong and the engine lives."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from playwright.sync_api import expect as expect_page
from playwright.sync_api import sync_playwright
from safetensors.torch import load_file, save_file
from server import BASE, Completion, Server, get
from tiny import logprobs, make_adapter, tokenizer

FLAGS = ("--enforce-eager", "--max-loras", "2", "--max-lora-rank", "16", "--max-model-len", "8192")
# Small enough that eight adapters do not fit: they are evicted from the host cache, too.
ENV = {"LORA_PLUGIN_HOST_MEMORY": "2MiB"}


@pytest.fixture(autouse=True)
def _clean(server: Server) -> Iterator[None]:
    """Every test begins with an empty directory, and leaves a server that answers."""
    yield
    for folder in server.adapters.iterdir():
        if not folder.name.startswith("."):
            shutil.rmtree(folder)
    server.wait_for(lambda: server.models() == [BASE], 10, "all adapters to be gone")
    assert server.complete(BASE, [65, 66, 67], 4).output


@pytest.fixture(scope="module")
def others(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight adapters of ranks 2 to 16."""
    root = tmp_path_factory.mktemp("others")
    return {
        f"n{i}": make_adapter(root / f"n{i}", model, seed=20 + i, rank=2 * i + 2, strength=1.5)
        for i in range(8)
    }


def expect(server: Server, model: Path, source: Path | None, name: str, prompt: list[int]) -> None:
    """The server's answer under this name is that of the adapter in `source`."""
    answer = server.complete(name, prompt, 8)
    assert answer.logprobs == pytest.approx(logprobs(model, source, prompt, answer.output), abs=2e-4)


def test_listed_within_a_second_of_its_last_byte(server: Server, sources: dict[str, Path]) -> None:
    server.drop(sources["alpha"], "alpha")
    assert server.wait_listed("alpha") < 1


def test_a_slow_copy_is_served_once_whole(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    folder = server.adapters / "alpha"
    folder.mkdir()
    shutil.copy(sources["alpha"] / "adapter_config.json", folder)
    time.sleep(0.6)
    weights = (sources["alpha"] / "adapter_model.safetensors").read_bytes()
    with (folder / "adapter_model.safetensors").open("wb", buffering=0) as file:
        for start in range(0, len(weights), len(weights) // 4 + 1):
            file.write(weights[start : start + len(weights) // 4 + 1])
            time.sleep(0.3)
            assert server.admin("/v1/adapters/alpha")[1]["state"] in ("settling", "discovered", "listed")
    server.wait_listed("alpha")
    expect(server, model, sources["alpha"], "alpha", prompt)


@pytest.mark.parametrize("how", ["in place", "rename"])
def test_an_update_reads_no_stale_prefix_cache(
    server: Server, model: Path, sources: dict[str, Path], how: str
) -> None:
    long = tokenizer().encode("Once upon a midnight dreary, while I pondered, weak and weary. " * 6)
    folder = server.drop(sources["alpha"], "alpha")
    server.wait_listed("alpha")
    expect(server, model, sources["alpha"], "alpha", long)
    before = server.admin("/v1/adapters/alpha")[1]["version"]
    if how == "in place":
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(sources["gamma"] / name, folder / name)
    else:
        shutil.copytree(sources["gamma"], server.adapters / ".alpha.new")
        folder.rename(server.adapters / ".alpha.old")
        (server.adapters / ".alpha.new").rename(folder)
    server.wait_for(
        lambda: server.admin("/v1/adapters/alpha")[1]["version"] not in (before, None), 10, "the new version"
    )
    expect(server, model, sources["gamma"], "alpha", long)
    for leftover in server.adapters.glob(".alpha.*"):
        shutil.rmtree(leftover)


def test_touched_files_are_the_same_version(
    server: Server, sources: dict[str, Path], prompt: list[int]
) -> None:
    folder = server.drop(sources["alpha"], "alpha")
    server.wait_listed("alpha")
    server.complete("alpha", prompt)
    before = server.admin("/v1/adapters/alpha")[1]
    for file in folder.iterdir():
        os.utime(file)
    time.sleep(1)
    after = server.admin("/v1/adapters/alpha")[1]
    assert (after["version"], after["id"]) == (before["version"], before["id"])


def test_running_requests_keep_their_version(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    """Overwritten, then deleted, while it decodes: that request finishes as it began."""
    folder = server.drop(sources["alpha"], "alpha")
    server.wait_listed("alpha")
    answers = []
    running = threading.Thread(target=lambda: answers.append(server.complete("alpha", prompt, 5000)))
    running.start()
    server.wait_for(lambda: server.admin("/v1/adapters/alpha")[1]["requests"] == 1, 20, "the request to run")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(sources["gamma"] / name, folder / name)
    expect_new = server.wait_for(
        lambda: server.admin("/v1/adapters/alpha")[1]["rank"] == 16, 10, "the new version to be listed"
    )
    assert expect_new < 5
    newer = server.complete("alpha", prompt, 8)
    shutil.rmtree(folder)
    server.wait_gone("alpha", 1)
    with pytest.raises(openai.NotFoundError):
        server.complete("alpha", prompt)
    assert running.is_alive()
    running.join(240)
    expected = logprobs(model, sources["gamma"], prompt, newer.output)
    assert newer.logprobs == pytest.approx(expected, abs=2e-4)
    (answer,) = answers
    assert len(answer.output) == 5000
    expected = logprobs(model, sources["alpha"], prompt, answer.output)
    assert answer.logprobs == pytest.approx(expected, abs=5e-4)


def test_beam_search_stays_on_its_version(
    server: Server, sources: dict[str, Path], prompt: list[int]
) -> None:
    """One response of hundreds of engine requests, with moments in which none of them runs."""
    folder = server.drop(sources["alpha"], "alpha")
    server.wait_listed("alpha")

    def search() -> str:
        answer = server.client.completions.create(
            model="alpha", prompt=prompt, n=2, max_tokens=150, extra_body={"use_beam_search": True}
        )
        return answer.choices[0].text

    expected = search()
    (old,) = versions(server, "alpha")
    answers = []
    running = threading.Thread(target=lambda: answers.append(search()))
    running.start()
    server.wait_for(lambda: server.admin("/v1/adapters/alpha")[1]["requests"] > 0, 20, "the search to run")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(sources["gamma"] / name, folder / name)
    server.wait_for(lambda: server.admin("/v1/adapters/alpha")[1]["rank"] == 16, 10, "the new version")
    server.complete("alpha", prompt, 4)
    assert running.is_alive()
    running.join(120)
    assert answers == [expected]
    server.wait_for(lambda: old not in versions(server, "alpha"), 5, "the old version to leave")


def versions(server: Server, name: str) -> set[str]:
    """The versions of an adapter that lie on the device."""
    extents = server.admin("/v1/pool")[1]["engines"][0]["extents"]
    return {extent["version"] for extent in extents if extent["adapter"] == name}


def test_more_adapters_than_fit(
    server: Server, model: Path, others: dict[str, Path], prompt: list[int]
) -> None:
    """Eight adapters through two slabs and a host cache that is too small, many at once."""
    for name, folder in others.items():
        server.drop(folder, name)
    for name in others:
        server.wait_listed(name)
    names = [*others, BASE] * 4

    async def together() -> list:
        return await asyncio.gather(*(server.complete_async(name, prompt, 6) for name in names))

    for name, answer in zip(names, asyncio.run(together()), strict=True):
        expected = logprobs(model, others.get(name), prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4), name
    engine = server.admin("/v1/pool")[1]["engines"][0]
    assert engine["counters"]["evictions"]["device-room"] > 0
    assert engine["host_bytes"] <= engine["host_budget_bytes"]


def test_twenty_first_requests_are_one_load(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    server.drop(sources["beta"], "beta")
    server.wait_listed("beta")
    staged = server.log.read_text().count("staged adapter 'beta'")

    async def together() -> list:
        return await asyncio.gather(*(server.complete_async("beta", prompt, 6) for _ in range(20)))

    expected = None
    for answer in asyncio.run(together()):
        expected = expected or logprobs(model, sources["beta"], prompt, answer.output)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4)
    # Dropped a moment ago, it was staged once in all: by the prefetch or by the first request.
    assert server.log.read_text().count("staged adapter 'beta'") - staged <= 1


def test_evicted_and_deleted(server: Server, sources: dict[str, Path], prompt: list[int]) -> None:
    folder = server.drop(sources["alpha"], "alpha")
    server.wait_listed("alpha")
    server.complete("alpha", prompt)
    assert server.admin("/v1/adapters/alpha/evict", "POST")[0] == 200
    assert server.admin("/v1/adapters/alpha")[1]["residency"] == {
        "disk": True,
        "host": 0,
        "device": 0,
        "engines": 1,
    }
    shutil.rmtree(folder)
    with pytest.raises(openai.APIStatusError) as error:
        server.complete("alpha", prompt)
    assert error.value.status_code in (404, 503)
    server.wait_gone("alpha", 1)
    with pytest.raises(openai.NotFoundError):
        server.complete("alpha", prompt)


def test_truncated_after_it_was_loaded(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    """A copy in progress looks the same: what is in memory is served; evicted, an error until it is whole."""
    folder = server.drop(sources["alpha"], "alpha")
    server.wait_listed("alpha")
    expect(server, model, sources["alpha"], "alpha", prompt)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    time.sleep(0.5)
    expect(server, model, sources["alpha"], "alpha", prompt)
    assert server.admin("/v1/adapters/alpha/evict", "POST")[0] == 200
    with pytest.raises(openai.APIStatusError) as error:
        server.complete("alpha", prompt)
    assert error.value.status_code == 503
    weights.write_bytes(whole)

    def answers() -> bool:
        try:
            expect(server, model, sources["alpha"], "alpha", prompt)
        except openai.APIStatusError:
            return False
        return True

    server.wait_for(answers, 10, "the whole file to be served")


def test_pinned_stays_and_unloaded_goes(server: Server, others: dict[str, Path], prompt: list[int]) -> None:
    for name in ("n0", "n1", "n7"):
        server.drop(others[name], name)
        server.wait_listed(name)
    assert server.admin("/v1/adapters/n0/pin", "POST")[0] == 200
    for name in ("n7", "n1", "n7", "n1"):
        server.complete(name, prompt)
    assert server.admin("/v1/adapters/n0")[1]["residency"]["device"] == 1
    status, problem = server.admin("/v1/adapters/n0/evict", "POST")
    assert (status, problem["code"]) == (409, "pinned")
    assert server.admin("/v1/adapters/n0/unpin", "POST")[0] == 200
    status, view = server.admin("/v1/adapters/n1", "DELETE")
    assert (status, view["state"]) == (200, "unloaded")
    server.wait_gone("n1", 1)
    with pytest.raises(openai.NotFoundError):
        server.complete("n1", prompt)
    assert server.admin("/v1/adapters/nobody/pin", "POST")[0] == 404


@pytest.mark.parametrize("drain", ["abort", "1"])
def test_unloaded_with_a_time_limit(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int], drain: str
) -> None:
    """What still runs then ends with what it has; other adapters' requests do not notice."""
    for name in ("alpha", "beta"):
        server.drop(sources[name], name)
        server.wait_listed(name)
    answers: dict[str, Completion] = {}

    def ask(name: str, tokens: int) -> None:
        answers[name] = server.complete(name, prompt, tokens)

    def drained_while_running() -> bool:
        """False where the machine was so busy that it ended before it was unloaded."""
        threads = [threading.Thread(target=ask, args=asked) for asked in (("alpha", 8000), ("beta", 1500))]
        for thread in threads:
            thread.start()
        for name in ("alpha", "beta"):
            server.wait_for(lambda name=name: bool(versions(server, name)), 20, f"{name} to run")
        time.sleep(0.3)
        assert server.admin(f"/v1/adapters/alpha?drain={drain}", "DELETE")[0] == 200
        in_time = "alpha" not in answers or answers["alpha"].finish_reason == "abort"
        for thread in threads:
            thread.join(120)
        return in_time

    while not drained_while_running():
        assert server.admin("/v1/adapters/alpha?wait=20", "PUT")[0] in (200, 201)
        answers.clear()
    ended, other = answers["alpha"], answers["beta"]
    assert ended.finish_reason == "abort"
    assert 0 < len(ended.output) < 8000
    assert (other.finish_reason, len(other.output)) == ("length", 1500)
    expected = logprobs(model, sources["alpha"], prompt, ended.output)
    assert ended.logprobs == pytest.approx(expected, abs=5e-4)
    server.wait_for(lambda: not versions(server, "alpha"), 5, "the version to leave")
    with pytest.raises(openai.NotFoundError):
        server.complete("alpha", prompt)
    server.admin("/v1/adapters/alpha", "PUT")


def test_a_bad_adapter_in_a_full_host_cache_costs_nobody_its_copy(
    server: Server, others: dict[str, Path], prompt: list[int], tmp_path: Path
) -> None:
    for name in others:
        server.drop(others[name], name)
        server.wait_listed(name)
    for name in others:
        server.complete(name, prompt, 1)

    def in_host_memory() -> set[str]:
        adapters = server.admin("/v1/adapters")[1]["adapters"]
        return {adapter["name"] for adapter in adapters if adapter["residency"]["host"]}

    before = in_host_memory()
    assert 0 < len(before) < len(others)
    bad = spoiled(others["n5"], tmp_path / "bad")
    server.drop(bad, "bad")
    server.wait_listed("bad")
    with pytest.raises(openai.BadRequestError):
        server.complete("bad", prompt)
    assert server.admin("/v1/adapters/bad")[1]["reason"]["code"] == "not-finite"
    assert in_host_memory() == before


def spoiled(source: Path, target: Path) -> Path:
    """A copy with a number that is none."""
    shutil.copytree(source, target)
    tensors = load_file(target / "adapter_model.safetensors")
    next(iter(tensors.values())).view(-1)[3] = torch.nan
    save_file(tensors, target / "adapter_model.safetensors")
    return target


def test_a_pin_is_by_name_and_goes_over_to_a_new_version(server: Server, others: dict[str, Path]) -> None:
    folder = server.drop(others["n1"], "kept")
    server.wait_listed("kept")
    assert server.admin("/v1/adapters/kept/pin", "POST")[0] == 200

    def pinned() -> set[str]:
        extents = server.admin("/v1/pool")[1]["engines"][0]["extents"]
        return {extent["version"] for extent in extents if extent["pinned"]}

    server.wait_for(lambda: len(pinned()) == 1, 5, "the pin")
    first = pinned()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(others["n2"] / name, folder / name)
    server.wait_for(lambda: len(pinned()) == 1 and pinned() != first, 10, "the new version to be pinned")


def test_a_pin_in_the_state_file_reaches_the_engine(server: Server, others: dict[str, Path]) -> None:
    """As another API server, or another tool, writes it."""
    server.drop(others["n1"], "kept")
    server.wait_listed("kept")
    state = server.adapters / ".lora_plugin" / "state.json"
    state.parent.mkdir(exist_ok=True)

    def decide(pinned: list[str]) -> None:
        (state.parent / "new").write_text(json.dumps({"pinned": pinned}))
        (state.parent / "new").rename(state)

    def pinned() -> bool:
        extents = server.admin("/v1/pool")[1]["engines"][0]["extents"]
        return any(extent["pinned"] and extent["adapter"] == "kept" for extent in extents)

    decide(["kept"])
    server.wait_for(pinned, 10, "the pin")
    decide([])
    server.wait_for(lambda: not pinned(), 10, "the pin to go")


def test_a_bad_adapter_evicts_no_good_one(
    server: Server, model: Path, others: dict[str, Path], prompt: list[int], tmp_path: Path
) -> None:
    for name in ("n6", "n7"):
        server.drop(others[name], name)
        server.wait_listed(name)
        server.complete(name, prompt)
    good = {name: versions(server, name) for name in ("n6", "n7")}
    assert all(good.values())
    server.drop(spoiled(others["n5"], tmp_path / "bad"), "bad")
    server.wait_for(
        lambda: server.admin("/v1/adapters/bad")[1].get("state") in ("listed", "rejected"), 10, "bad"
    )
    with pytest.raises(openai.BadRequestError):
        server.complete("bad", prompt)
    assert server.admin("/v1/adapters/bad")[1]["reason"]["code"] == "not-finite"
    assert {name: versions(server, name) for name in good} == good
    expect(server, model, others["n6"], "n6", prompt)


def test_the_operator_loads_reloads_and_follows(
    server: Server, model: Path, others: dict[str, Path], prompt: list[int]
) -> None:
    server.drop(others["n3"], "n3")
    server.wait_listed("n3")
    assert server.admin("/v1/adapters/n3?wait=30", "PUT")[0] in (200, 201)
    status, view = server.admin("/v1/adapters/n3", "PUT")
    assert (status, view["residency"]["host"]) == (200, 1)
    assert server.admin("/v1/adapters/n3/evict", "POST")[0] == 200
    status, view = server.admin("/v1/adapters/n3?wait=30", "PUT")
    assert (status, view["residency"]["host"]) == (201, 1)
    assert server.admin("/v1/adapters/n3", "DELETE")[0] == 200
    server.wait_gone("n3", 1)
    assert server.admin("/v1/adapters/n3/reload", "POST")[1]["state"] == "listed"
    expect(server, model, others["n3"], "n3", prompt)
    assert server.admin("/v1/adapters/nobody", "PUT")[0] == 404
    with urllib.request.urlopen(
        f"http://127.0.0.1:{server.admin_port}/v1/events?after=0", timeout=30
    ) as stream:
        seen = set()
        while {"unloaded", "listed"} - seen:
            line = stream.readline().decode()
            if line.startswith("data:") and '"n3"' in line:
                seen.add(json.loads(line.removeprefix("data:"))["kind"])
    config = {row["variable"]: row for row in server.admin("/v1/config")[1]["settings"]}
    assert config["LORA_PLUGIN_HOST_MEMORY"]["value"] == "2MiB"
    assert config["LORA_PLUGIN_KERNELS"]["source"] == "default"


def test_both_metrics_endpoints_count_what_was_served(
    server: Server, others: dict[str, Path], prompt: list[int]
) -> None:
    def scraped(port: int) -> dict[str, float]:
        text = get(f"http://127.0.0.1:{port}/metrics")[1].decode()
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        assert len({name for name, _ in lines}) == len(lines)
        return {name: float(value) for name, value in lines}

    server.drop(others["n4"], "counted")
    server.wait_listed("counted")
    for _ in range(2):
        server.complete("counted", prompt, 5)
    server.complete(BASE, prompt, 5)
    host, own = scraped(server.port), scraped(server.admin_port)
    label = '{adapter="counted"}'
    for samples in (host, own):
        assert samples["lora_plugin_up"] == 1
        assert samples[f"lora_plugin_requests_total{label}"] == 2
        assert samples[f"lora_plugin_prompt_tokens_total{label}"] == 2 * len(prompt)
        assert samples[f"lora_plugin_generated_tokens_total{label}"] == 10
        assert samples['lora_plugin_load_seconds_count{stage="pack"}'] >= 1
        assert samples['lora_plugin_load_seconds_count{stage="device"}'] == samples["lora_plugin_loads_total"]
        assert samples['lora_plugin_step_adapters_bucket{le="1.0"}'] >= 10
    assert any(name.startswith("vllm:") for name in host)
    assert not any(name.startswith("vllm:") for name in own)


def test_the_page_steers_a_running_server(
    server: Server, sources: dict[str, Path], chromium: dict[str, Any]
) -> None:
    server.drop(sources["alpha"], "alpha")
    server.wait_listed("alpha")
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(**chromium).new_page()
        page.goto(f"http://127.0.0.1:{server.admin_port}/")
        row = page.locator('tr[data-name="alpha"]')
        assert server.complete("alpha", [65, 66, 67], 4).output
        expect_page(row.locator(".where")).to_contain_text("device")
        expect_page(page.locator(".extent")).to_contain_text(["alpha"])

        row.get_by_role("button", name="Pin alpha", exact=True).click()
        expect_page(row.locator(".pinned")).to_be_visible()
        row.get_by_role("button", name="Unpin").click()
        expect_page(row.locator(".pinned")).to_be_hidden()

        row.get_by_role("button", name="Evict").click()
        page.locator("#confirm-yes").click()
        expect_page(row.locator(".where")).to_have_text("disk")
        row.get_by_role("button", name="Load alpha", exact=True).click()
        expect_page(row.locator(".where")).to_contain_text("host")

        folder = server.adapters / "bad"
        shutil.copytree(sources["beta"], folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 7}))
        expect_page(page.locator("tr.reason")).to_contain_text("rank-mismatch")
        expect_page(page.locator("#events")).to_contain_text("rejected bad")

        row.get_by_role("button", name="Unload").click()
        page.locator("#confirm-yes").click()
        expect_page(row.locator(".state")).to_have_text("unloaded")
        assert "alpha" not in server.models()
