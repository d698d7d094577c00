"""What strangers may put into the directory or ask for: refused with a reason, and the server lives."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count
from pathlib import Path

import psutil
import pytest
from adapter_samples import edit_config
from folder_changes import CHANGES, CONFIG, WEIGHTS, Change, break_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server import BASE, Server, get
from tiny import logprobs, make_adapter

FLAGS = ("--enforce-eager", "--max-loras", "2", "--max-lora-rank", "8", "--max-model-len", "2048")
ENV = {"LORA_PLUGIN_SETTLE_SECONDS": "0", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
COUNTER = count()

Spoil = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _clean(server: Server) -> Iterator[None]:
    """Every test begins with an empty directory, and leaves a server that answers."""
    yield
    server.adapters.mkdir(exist_ok=True)
    for entry in server.adapters.iterdir():
        if entry.is_symlink():
            entry.unlink()
        elif not entry.name.startswith("."):
            shutil.rmtree(entry)
    server.wait_for(lambda: server.models() == [BASE], 10, "all adapters to be gone")
    assert server.complete(BASE, [65, 66, 67], 4).output


def instead(file: str, make: Spoil) -> Spoil:
    """Puts something else in the place of a file of the adapter."""

    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return spoil


def bind(path: Path) -> None:
    # The path of a socket is short.
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


def header(length: int, text: bytes) -> Spoil:
    return lambda path: path.write_bytes(struct.pack("<Q", length) + text)


def configured(**fields: object) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | fields))

    return spoil


SPOILED: dict[str, tuple[Spoil, str]] = {
    "fifo": (instead(WEIGHTS, os.mkfifo), "unreadable"),
    "fifo-config": (instead(CONFIG, os.mkfifo), "unreadable"),
    "socket": (instead(WEIGHTS, bind), "unreadable"),
    "folder": (instead(WEIGHTS, Path.mkdir), "unreadable"),
    "device": (instead(WEIGHTS, lambda path: path.symlink_to("/dev/zero")), "path-escape"),
    "outside": (instead(CONFIG, lambda path: path.symlink_to("/etc/hostname")), "path-escape"),
    "sparse": (instead(WEIGHTS, lambda path: (path.touch(), os.truncate(path, 3 << 30))), "too-large"),
    "long-header": (instead(WEIGHTS, header(1 << 63, b"{}")), "weights-invalid"),
    "deep-header": (instead(WEIGHTS, header(200_000, b"[" * 200_000)), "weights-invalid"),
    "deep-config": (
        instead(CONFIG, lambda path: path.write_bytes(b"[" * 50_000 + b"{}" + b"]" * 50_000 + b"}")),
        "config-invalid",
    ),
    "slow-pattern": (configured(rank_pattern={"(a+)+$": 8}), "config-invalid"),
    "huge-rank": (configured(r=10**30), "rank-invalid"),
    "infinite": (configured(lora_alpha=float("inf")), "alpha-invalid"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_folder_is_refused_with_its_reason(
    server: Server, sources: dict[str, Path], tmp_path: Path, case: str
) -> None:
    spoil, code = SPOILED[case]
    spoil(shutil.copytree(sources["alpha"], tmp_path / "spoiled"))
    (tmp_path / "spoiled").rename(server.adapters / case)
    server.wait_for(
        lambda: server.admin(f"/v1/adapters/{case}")[1].get("state") == "rejected", 5, "a refusal"
    )
    assert server.admin(f"/v1/adapters/{case}")[1]["reason"]["code"] == code
    status, body = get(f"{server.url}/v1/completions", "POST", {"model": case, "prompt": "a"})
    assert status == 400
    assert f"[{code}]" in json.loads(body)["error"]["message"]


BYTES = st.builds(
    lambda *where: lambda folder: break_bytes(folder, *where),
    st.sampled_from([CONFIG, WEIGHTS, "header"]),
    st.floats(0, 1),
    st.binary(min_size=1, max_size=4) | st.none(),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(changes=st.tuples(st.lists(CHANGES, max_size=2), st.lists(BYTES, max_size=1)).filter(any))
def test_whatever_a_folder_holds(
    server: Server,
    model: Path,
    sources: dict[str, Path],
    tmp_path: Path,
    prompt: list[int],
    changes: tuple[list[Change], list[Change]],
) -> None:
    """What PEFT makes of it or a refusal with a code; and the base model's answer beside it, to the bit."""
    server.complete(BASE, prompt)
    before = server.complete(BASE, prompt)
    folder = tmp_path / f"changed{next(COUNTER)}"
    shutil.copytree(sources["alpha"], folder)
    for change in chain(*changes):
        change(folder)
    server.drop(folder, f".{folder.name}.tmp").rename(server.adapters / folder.name)
    with ThreadPoolExecutor(1) as thread:
        beside = thread.submit(server.complete, BASE, prompt, 40)
        status, body = answered(server, folder.name, prompt)
        assert beside.result().output[: len(before.output)] == before.output
    if status == 200 and targets(folder) == targets(sources["alpha"]):
        # PEFT stumbles over null where its own default is meant.
        config = json.loads((folder / CONFIG).read_text())
        edit_config(folder, **{key: ... for key, value in config.items() if value is None})
        answer = server.complete(folder.name, prompt)
        assert answer.logprobs == pytest.approx(logprobs(model, folder, prompt, answer.output), abs=5e-4)
    elif status != 200:
        assert status in (400, 503), body
        assert re.search(r"\[[a-z-]+\]", json.loads(body)["error"]["message"])
    assert server.complete(BASE, prompt) == before


def targets(folder: Path) -> dict[str, object]:
    """What PEFT goes by, and the plugin does not: to it the tensors say what is targeted."""
    config: dict[str, object] = json.loads((folder / CONFIG).read_text())
    return {key: value for key, value in config.items() if "modules" in key or "layers" in key}


def answered(server: Server, name: str, prompt: list[int]) -> tuple[int, bytes]:
    """Status and body of a request, once the folder was noticed."""
    body = {"model": name, "prompt": prompt, "max_tokens": 1}
    found: list[tuple[int, bytes]] = []

    def noticed() -> bool:
        found[:] = [get(f"{server.url}/v1/completions", "POST", body)]
        return found[0][0] != 404

    server.wait_for(noticed, 10, f"{name} to be noticed")
    return found[0]


@pytest.mark.parametrize(
    "name", ["../adapters/good", "good/", "./good", "GOOD", "good\0", f"{BASE}:../good", ".."]
)
def test_names_are_looked_up_and_never_joined_to_a_path(
    server: Server, sources: dict[str, Path], name: str
) -> None:
    server.drop(sources["alpha"], "good")
    server.wait_listed("good")
    status, _ = get(f"{server.url}/v1/completions", "POST", {"model": name, "prompt": "a"})
    assert status == 404


def test_a_folder_named_as_the_base_model_does_not_replace_it(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    server.drop(sources["alpha"], BASE)
    server.drop(sources["alpha"], "after")
    server.wait_listed("after")
    assert server.models() == [BASE, "after"]
    answer = server.complete(BASE, prompt, 8)
    assert answer.logprobs == pytest.approx(logprobs(model, None, prompt, answer.output), abs=2e-4)


def test_links_in_circles_and_out_are_not_followed(server: Server, sources: dict[str, Path]) -> None:
    (server.adapters / "circle").symlink_to("circle")
    (server.adapters / "itself").symlink_to(server.adapters)
    (server.adapters / "outside").symlink_to(sources["alpha"])
    server.drop(sources["alpha"], "good")
    server.wait_listed("good")
    assert server.models() == [BASE, "good"]

    def refused() -> bool:
        reason = server.admin("/v1/adapters/outside")[1].get("reason")
        return reason is not None and reason["code"] == "path-escape"

    server.wait_for(refused, 10, "the link to be refused")


def test_the_hosts_own_loading_takes_nothing_from_elsewhere(server: Server, sources: dict[str, Path]) -> None:
    body = {"lora_name": "good", "lora_path": str(sources["beta"]), "load_inplace": True}
    server.drop(sources["alpha"], "good")
    server.wait_listed("good")
    assert get(f"{server.url}/v1/load_lora_adapter", "POST", body)[0] == 404
    assert server.models() == [BASE, "good"]


def test_the_directory_is_removed_and_made_again(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    server.drop(sources["alpha"], "name")
    server.wait_listed("name")
    assert server.complete("name", prompt).output
    shutil.rmtree(server.adapters)
    server.adapters.mkdir()
    server.drop(sources["beta"], "name")
    server.wait_for(lambda: server.admin("/v1/adapters/name")[1].get("rank") == 5, 12, "what is there now")
    answer = server.complete("name", prompt, 8)
    assert answer.logprobs == pytest.approx(logprobs(model, sources["beta"], prompt, answer.output), abs=2e-4)


def test_hundreds_of_folders_at_once(server: Server, sources: dict[str, Path], prompt: list[int]) -> None:
    names = [f"many{i:03}" for i in range(300)]
    for name in names:
        (server.adapters / name).mkdir()
        for file in (CONFIG, WEIGHTS):
            os.link(sources["delta"] / file, server.adapters / name / file)
    server.wait_for(lambda: len(server.models()) == 301, 20, "all to be listed")
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda name: server.complete(name, prompt, 4).output, names[::40])
    # The same content under every name.
    assert len({tuple(output) for output in answers}) == 1


def test_prompt_log_probabilities_beside_other_adapters(
    server: Server, model: Path, sources: dict[str, Path], tmp_path: Path, prompt: list[int]
) -> None:
    """They are logits of prompt rows, request by request: of the request's own adapter, lm_head included."""
    head = make_adapter(tmp_path / "head", model, seed=77, rank=4, targets=("q_proj", "lm_head"))
    folders = {"head": head, "alpha": sources["alpha"], BASE: None}
    for name, folder in folders.items():
        if folder is not None:
            server.drop(folder, name)
            server.wait_listed(name)

    def ask(name: str) -> list[float]:
        answer = server.client.completions.create(
            model=name, prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        scores: list[float] = answer.choices[0].logprobs.token_logprobs[1 : len(prompt)]
        return scores

    names = [*folders] * 4
    with ThreadPoolExecutor(16) as threads:
        others = [threads.submit(server.complete, name, prompt, 60) for name in folders]
        answers = list(threads.map(ask, names))
    for name, scores in zip(names, answers, strict=True):
        assert scores == pytest.approx(logprobs(model, folders[name], prompt[:1], prompt[1:]), abs=2e-4), name
    for name, other in zip(folders, others, strict=True):
        done = other.result()
        assert done.logprobs == pytest.approx(logprobs(model, folders[name], prompt, done.output), abs=5e-4)


def test_weights_that_overflow_reach_no_one(
    server: Server, sources: dict[str, Path], tmp_path: Path, prompt: list[int]
) -> None:
    before = server.complete(BASE, prompt, 8).output
    folder = shutil.copytree(sources["alpha"], tmp_path / "huge")
    configured(lora_alpha=1e29)(folder)
    server.drop(folder, "huge")
    server.wait_for(
        lambda: server.admin("/v1/adapters/huge")[1].get("state") == "rejected", 15, "huge to be rejected"
    )
    assert server.admin("/v1/adapters/huge")[1]["reason"]["code"] == "not-finite"
    status, _ = get(f"{server.url}/v1/completions", "POST", {"model": "huge", "prompt": prompt})
    assert status == 400
    assert server.complete(BASE, prompt, 8).output == before


def test_the_process_that_packs_is_killed(
    server: Server, model: Path, sources: dict[str, Path], prompt: list[int]
) -> None:
    """Beside a stream, whose answer stays the same; the next adapter is served."""
    base = server.complete(BASE, prompt, 60).output
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(server.complete, BASE, prompt, 60)
        killed = 0
        for process in psutil.Process(server.process.pid).children(recursive=True):
            if "lora_plugin.worker.packing_process" in process.cmdline():
                process.kill()
                killed += 1
        assert killed == 1
        server.drop(sources["beta"], "after")
        server.wait_listed("after")
        answer = server.complete("after", prompt, 8)
        assert stream.result().output == base
    assert answer.logprobs == pytest.approx(logprobs(model, sources["beta"], prompt, answer.output), abs=2e-4)


def test_scoring_uses_the_adapter_that_it_names(server: Server, sources: dict[str, Path]) -> None:
    server.drop(sources["alpha"], "alpha")
    server.wait_listed("alpha")
    question = {"query": "hi there", "items": ["x"], "label_token_ids": [65, 66]}
    answers = []
    for name in (BASE, "alpha"):
        status, body = get(f"{server.url}/generative_scoring", "POST", {"model": name, **question})
        assert status == 200
        answers.append(json.loads(body)["data"][0]["score"])
    assert answers[0] != answers[1]


def test_a_folder_name_that_is_not_utf8_hides_nothing(server: Server, sources: dict[str, Path]) -> None:
    odd = os.fsencode(server.adapters) + b"/bad\xff"
    os.mkdir(odd)  # noqa: PTH102 - a name that no str path of the test has
    server.drop(sources["alpha"], "alpha")
    server.wait_listed("alpha")
    assert server.admin("/v1/adapters")[0] == 200
    os.rmdir(odd)  # noqa: PTH106
