"""`lora-plugin doctor`: what it says, and its exit code."""

from __future__ import annotations

import json
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from command_runs import run

from lora_plugin.cli.doctor import general, render

ENGINE = {
    "slabs": 2,
    "waiting_requests": 0,
    "longest_wait_seconds": 0.0,
    "counters": {"loads": 2, "hits": 9, "misses": 2, "evictions": {}},
}
ADAPTERS = [
    {"name": "sql", "state": "listed", "reason": None, "warnings": []},
    {
        "name": "bad",
        "state": "rejected",
        "reason": {"message": "no rank", "code": "rank-invalid", "hint": "restore it"},
        "warnings": [],
    },
    {
        "name": "half",
        "state": "settling",
        "reason": {"message": "a file is missing", "code": "weights-missing"},
        "warnings": ["odd"],
    },
]


def routing(**changes: Any) -> dict[str, Any]:
    return {"aliases": [], "compositions": [], "files": [], **changes}


def named(name: str, key: str, *adapters: str | None) -> dict[str, Any]:
    return {"name": name, key: [{"adapter": adapter} for adapter in adapters]}


def test_nothing_is_wrong() -> None:
    aliases = [named("prod", "targets", "sql", None), named("both", "targets", "mix")]
    compositions = [named("mix", "parts", "sql", "sql")]
    found = list(
        general(ADAPTERS[:1], routing(aliases=aliases, compositions=compositions), {"engines": [ENGINE]})
    )
    assert found == []
    assert "nothing is wrong" in render(found)


def test_loads_without_evictions_are_those_after_a_start() -> None:
    counters = {"loads": 50, "hits": 10, "misses": 50, "evictions": {"device-room": 0}}
    assert not list(general([], routing(), {"engines": [{**ENGINE, "counters": counters}]}))


def test_what_is_wrong_comes_first() -> None:
    file = {
        "name": "aliases.yaml",
        "reason": {"message": "aliases.yaml cannot be used: line 3", "code": "routing-invalid"},
    }
    busy = {**ENGINE, "waiting_requests": 3, "longest_wait_seconds": 2.0}
    busy["counters"] = {**ENGINE["counters"], "loads": 50, "hits": 10, "evictions": {"device-room": 40}}  # type: ignore[dict-item]
    lines = render(
        list(
            general(
                ADAPTERS,
                routing(aliases=[named("prod", "targets", "gone")], files=[file]),
                {"engines": [busy]},
            )
        )
    ).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["PROBLEM", "bad"],
        ["PROBLEM", "aliases.yaml"],
        ["PROBLEM", "prod"],
        ["NOTE", "half"],
        ["NOTE", "half"],
        ["NOTE", "engine"],
        ["NOTE", "engine"],
    ]
    assert lines[0].endswith("rejected: no rank [rank-invalid]; hint: restore it")
    assert "stands for gone, which is not served" in lines[2]


@pytest.mark.parametrize(("name", "code"), [("sql", 0), ("wide", 1)])
def test_one_adapter(url: str, name: str, code: int) -> None:
    human = run("doctor", name, "--admin", url, "--format", "human")
    assert human.returncode == code
    assert "no-effect" in human.stdout
    as_json = run("doctor", name, "--admin", url, "--format", "json")
    assert (as_json.returncode, json.loads(as_json.stdout)["name"]) == (code, name)


def test_the_server(url: str) -> None:
    result = run("doctor", "--admin", url, "--format", "human")
    assert result.returncode == 1
    assert "The rank is above the server's maximum" in result.stdout


def test_an_unknown_name_is_refused(url: str) -> None:
    result = run("doctor", "nobody", "--admin", url)
    assert result.returncode == 1
    assert "not-found" in result.stderr


@pytest.fixture
def nobody() -> str:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return str(gone.getsockname()[1])


def test_without_a_server_it_looks_at_what_one_would_start_with(nobody: str, tmp_path: Path) -> None:
    result = run(
        "doctor", "--format", "human", LORA_PLUGIN_ADMIN_PORT=nobody, LORA_PLUGIN_ADAPTER_DIR=str(tmp_path)
    )
    assert result.returncode == 3
    assert "Connection refused" in result.stderr
    assert "what one would start with" in result.stderr
    assert "Errno" not in result.stderr
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert [line[:2] for line in lines] == [
        ["OK", "vLLM"],
        ["OK", "settings"],
        ["OK", "directory"],
        ["OK", "fit"],
    ]
    assert lines[0][2].startswith(metadata.version("vllm"))
    assert str(tmp_path) in lines[2][2]


@pytest.mark.parametrize(
    ("variables", "about", "words"),
    [
        ({"VLLM_PLUGINS": "another"}, "VLLM_PLUGINS", "does not name lora_plugin"),
        ({"LORA_PLUGIN_WATCH": "sometimes"}, "settings", "LORA_PLUGIN_WATCH has a value that does not fit"),
        ({"LORA_PLUGIN_ADMIN_TLS_CERT": "/none.pem"}, "settings", "/none.pem: No such file"),
        (
            {"LORA_PLUGIN_HOOKS": "no_such_module"},
            "settings",
            "'no_such_module' cannot be imported",
        ),
    ],
)
def test_without_a_server_it_says_what_would_keep_one_from_serving(
    nobody: str, tmp_path: Path, variables: dict[str, str], about: str, words: str
) -> None:
    given = {"LORA_PLUGIN_ADMIN_PORT": nobody, "LORA_PLUGIN_ADAPTER_DIR": str(tmp_path), **variables}
    result = run("doctor", "--format", "json", **given)
    (problem,) = [found for found in json.loads(result.stdout) if found["level"] == "problem"]
    assert (result.returncode, problem["about"]) == (1, about)
    why_no_answer = result.stderr.splitlines()[1]
    assert nobody in why_no_answer or "/none.pem" in why_no_answer
    assert words in problem["text"]


def test_without_a_server_it_names_the_hook_plugins_that_one_would_load(nobody: str, tmp_path: Path) -> None:
    (tmp_path / "door.py").write_text(
        "from lora_plugin.hooks import hookimpl\n@hookimpl\ndef authorize(request, adapter): return None\n"
    )
    given = {"LORA_PLUGIN_ADMIN_PORT": nobody, "LORA_PLUGIN_ADAPTER_DIR": str(tmp_path)}
    result = run("doctor", "--format", "json", LORA_PLUGIN_HOOKS="door", PYTHONPATH=str(tmp_path), **given)
    (settings,) = [found for found in json.loads(result.stdout) if found["about"] == "settings"]
    assert settings["text"] == "they fit together; plugins: door"


def test_a_vllm_that_the_plugin_does_not_fit_is_told_of_before_a_server_is_started(
    nobody: str, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("print('hello')")
    result = run("doctor", "--format", "json", LORA_PLUGIN_ADMIN_PORT=nobody, PYTHONPATH=str(tmp_path))
    (problem,) = [found for found in json.loads(result.stdout) if found["level"] == "problem"]
    assert (result.returncode, problem["about"]) == (1, "fit")
    assert "No module named 'vllm." in problem["text"]
    assert "install a supported vLLM" in problem["text"]


def test_a_vllm_that_cannot_be_imported_is_told_of_by_its_error(nobody: str, tmp_path: Path) -> None:
    """Whatever it said before."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(
        "import os\nos.write(1, b'INFO caf\\xe9\\n')\nraise RuntimeError('no such device')\n"
    )
    result = run("doctor", "--format", "json", LORA_PLUGIN_ADMIN_PORT=nobody, PYTHONPATH=str(tmp_path))
    (problem,) = [found for found in json.loads(result.stdout) if found["level"] == "problem"]
    assert (problem["about"], problem["text"]) == ("fit", "RuntimeError: no such device")


def test_a_clone_of_vllm_that_it_is_run_in_is_not_the_one_that_would_serve(
    nobody: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('not built')")
    monkeypatch.chdir(tmp_path)
    result = run("doctor", "--format", "json", LORA_PLUGIN_ADMIN_PORT=nobody, PYTHONPATH="")
    assert {found["about"]: found["level"] for found in json.loads(result.stdout)}["fit"] == "ok"


def test_of_another_machines_server_nothing_is_said_of_this_one(nobody: str) -> None:
    result = run("doctor", "--admin", f"http://127.0.0.1:{nobody}")
    assert (result.returncode, result.stdout) == (3, "")
