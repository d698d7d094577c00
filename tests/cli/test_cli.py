from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from command_runs import run
from memory_operations import REJECTION, MemoryOperations, listed

from lora_plugin.cli import client as client_module
from lora_plugin.cli import human, main
from lora_plugin.cli.client import AdminClient
from lora_plugin.cli.human import size
from lora_plugin.readiness.loads import LoadOutcome


def test_list_for_people(url: str) -> None:
    result = run("list", "--admin", url, "--format", "human")
    assert (result.returncode, result.stderr) == (0, "")
    head, *rows = result.stdout.splitlines()
    assert head.split() == [
        "NAME", "STATE", "RANK", "VERSION", "HOST", "DEVICE", "PINNED", "REQUESTS", "REASON"
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["busy", "sql", "wide", "zz"]
    assert rows[1].split() == ["sql", "listed", "16", "5f5f5f5f5f5f", "2/2", "1/2", "no", "0"]
    assert rows[2].endswith("The rank is above the server's maximum [rank-too-large]")
    assert "\x1b" not in result.stdout


def test_list_as_json_with_filters(url: str) -> None:
    result = run("list", "--admin", url, "--format", "json", "--state", "listed", "-q", "SQL")
    assert [view["name"] for view in json.loads(result.stdout)] == ["sql"]


def test_the_environment_names_the_endpoint(url: str) -> None:
    parts = urlsplit(url)
    result = run(
        "show",
        "sql",
        "--format",
        "human",
        LORA_PLUGIN_ADMIN_HOST="0.0.0.0",
        LORA_PLUGIN_ADMIN_PORT=str(parts.port),
    )
    assert result.returncode == 0
    assert result.stdout.splitlines()[0].split() == ["name", "sql"]


def test_a_proxy_is_not_asked(url: str) -> None:
    result = run("list", "--admin", url, http_proxy="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")
    assert result.returncode == 0


def test_changes_reach_the_server(url: str, operations: MemoryOperations) -> None:
    pinned = run("pin", "sql", "--admin", url, "--format", "json")
    assert (pinned.returncode, json.loads(pinned.stdout)["pinned"]) == (0, True)
    assert pinned.stderr == "lora-plugin: sql: pinned\n"
    assert operations.views["sql"].pinned is True
    assert run("unpin", "sql", "--admin", url).returncode == 0
    assert operations.views["sql"].pinned is False
    assert run("evict", "sql", "--admin", url).returncode == 0
    assert operations.views["sql"].residency.host == 0
    assert run("unload", "sql", "--yes", "--admin", url).returncode == 0
    assert operations.views["sql"].state == "unloaded"


def test_a_load_that_waits_for_its_files_says_for_what(
    url: str, operations: MemoryOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load(*_: object) -> LoadOutcome:
        return LoadOutcome.UNDER_WAY

    monkeypatch.setattr(operations, "load", load)
    result = run("load", "wide", "--admin", url)
    # A script goes on only with an adapter that is there, unless it did not mean to wait.
    assert result.returncode == 1
    assert result.stderr.startswith(f"lora-plugin: wide: not loaded yet: {REJECTION.message} [")
    assert run("load", "wide", "--wait", "0", "--admin", url).returncode == 0


def test_a_refusal_shows_detail_and_hint(url: str) -> None:
    run("pin", "sql", "--admin", url)
    result = run("evict", "sql", "--admin", url)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "lora-plugin: 'sql' is pinned [pinned]\nlora-plugin: hint: unpin it first\n"
    assert run("show", "none", "--admin", url).returncode == 1


def test_the_token_comes_from_the_environment(locked_url: str) -> None:
    refused = run("pool", "--admin", locked_url)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "[unauthorized]" in refused.stderr
    assert "LORA_PLUGIN_ADMIN_TOKEN" in refused.stderr
    assert run("pool", "--admin", locked_url, LORA_PLUGIN_ADMIN_TOKEN="s3cret").returncode == 0


def test_who_is_locked_out_is_told_for_how_long(locked_url: str) -> None:
    for _ in range(11):
        result = run("pool", "--admin", locked_url, LORA_PLUGIN_ADMIN_TOKEN="wrong")
    assert result.returncode == 1
    assert "[too-many-requests]" in result.stderr
    assert re.search(r"hint: try again in \d+ s$", result.stderr, re.MULTILINE)


def test_routing_for_people() -> None:
    shares = [
        {"adapter": "sql", "version": "4f2a91c", "weight": 90.0},
        {"adapter": None, "version": None, "weight": 10.0},
    ]
    parts = [
        {"adapter": name, "version": None, "weight": weight} for name, weight in (("a", 0.7), ("b", -0.3))
    ]
    view = {
        "aliases": [{"name": "prod", "targets": shares, "sticky": "X-Tenant", "fallback": True}],
        "compositions": [{"name": "mix", "parts": parts}],
        "files": [{"name": "aliases.yaml", "reason": {"message": "line 3\x1b", "code": "routing-invalid"}}],
    }
    assert [re.split(r"  +", line) for line in human.routing(view).splitlines()] == [
        ["NAME", "KIND", "STANDS FOR", "STICKY", "FALLBACK"],
        ["prod", "alias", "sql@4f2a91c 90, base 10", "X-Tenant", "base"],
        ["mix", "composition", "a*0.7+b*-0.3", "-", "-"],
        ["line 3? [routing-invalid]"],
    ]


def test_pool_for_people(url: str) -> None:
    lines = run("pool", "--admin", url, "--format", "human").stdout.splitlines()
    assert lines[0] == ("engine 0: 240 of 256 rows free (4 slabs of 64); host memory 8.0 KiB of 1.0 MiB")
    assert lines[1] == "loads 5, hits 7, misses 2, evictions 2"
    assert lines[2] == "3 requests wait for room, the oldest 1.5 s"
    assert lines[4].split() == ["0", "8-23", "sql", "5f5f5f5f5f5f", "no", "1"]
    assert lines[6].startswith("engine 1: 256 of 256 rows free")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["show"],
        ["list", "--format", "xml"],
        ["list", "--admin", "file:///etc/passwd"],
        ["list", "--admin", "http://host:99999"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "usage: lora-plugin" in result.stderr


def test_an_endpoint_switched_off_is_wrong_usage() -> None:
    result = run("list", LORA_PLUGIN_ADMIN_PORT="0")
    assert result.returncode == 2
    assert "LORA_PLUGIN_ADMIN_PORT=0" in result.stderr


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    result = run("list", LORA_PLUGIN_ADMIN_PORT=str(port))
    assert (result.returncode, result.stdout) == (3, "")
    assert f"http://127.0.0.1:{port}" in result.stderr


def test_a_wrong_path_is_refused(url: str) -> None:
    result = run("pool", "--admin", f"{url}/nothing/here")
    assert (result.returncode, result.stdout) == (1, "")
    assert "[route-unknown]" in result.stderr


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "does not answer as an admin endpoint"),
        (b'{"detail":"Not Found"}', "answered 404, but not as an admin endpoint"),
    ],
)
def test_another_servers_answer_is_no_admin_endpoints(body: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = subprocess.Popen(
            [sys.executable, "-c", "import sys; from lora_plugin.cli import main; sys.exit(main())",
             "pool", "--admin", f"http://127.0.0.1:{port}"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            _, said = command.communicate(timeout=60)
    assert command.returncode == 3
    assert words in said


def test_list_reads_every_page(
    url: str, operations: MemoryOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PAGE", 3)
    operations.views.update({name: listed(name) for name in ("a", "b", "c")})
    names = [view["name"] for view in AdminClient(url).adapters()]
    assert names == ["a", "b", "busy", "c", "sql", "wide", "zz"]


def test_settings_with_their_sources() -> None:
    result = run(
        "config",
        "--format",
        "json",
        NIM_PEFT_SOURCE="/adapters",
        LORA_PLUGIN_ADMIN_TOKEN="s3cret",
        LORA_PLUGIN_HOST_MEMORY="2048MiB",
    )
    rows = {row["variable"]: (row["value"], row["source"]) for row in json.loads(result.stdout)}
    assert (result.returncode, result.stderr) == (0, "")
    assert rows["LORA_PLUGIN_ADAPTER_DIR"] == ("/adapters", "NIM_PEFT_SOURCE")
    assert rows["LORA_PLUGIN_HOST_MEMORY"] == ("2GiB", "LORA_PLUGIN_HOST_MEMORY")
    assert rows["LORA_PLUGIN_ADMIN_PORT"] == ("8765", "default")
    assert rows["LORA_PLUGIN_ADMIN_TOKEN"] == ("****", "LORA_PLUGIN_ADMIN_TOKEN")


def test_settings_of_a_plugin_that_is_off() -> None:
    result = run("config", LORA_PLUGIN_ADMIN_TOKEN="s3cret", LORA_PLUGIN_WATCH="poll")
    assert result.returncode == 0
    assert "the plugin would be off" in result.stderr
    assert "s3cret" not in result.stdout
    assert "poll" in result.stdout


def test_settings_that_do_not_fit_are_refused_like_the_start() -> None:
    result = run("config", LORA_PLUGIN_ADAPTER_DIR="/adapters", LORA_PLUGIN_WATCH="often")
    assert (result.returncode, result.stdout) == (1, "")
    assert "[settings-invalid]" in result.stderr
    assert "LORA_PLUGIN_WATCH" in result.stderr


@pytest.mark.parametrize("arguments", [["config"], ["list"]])
def test_no_command_imports_the_heavy_packages(arguments: list[str]) -> None:
    script = (
        "import sys; from lora_plugin.cli import main; main(sys.argv[1:]);"
        "print([name for name in ('torch', 'vllm', 'aiohttp', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env={"LORA_PLUGIN_ADMIN_PORT": "1"},
        timeout=60,
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_main_returns_the_exit_code(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "wide", "--admin", url, "--format", "human"]) == 0
    shown = capsys.readouterr().out
    assert "reason code" in shown
    assert "start the server with --max-lora-rank 128" in shown


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (8192, "8.0 KiB"),
        (4 << 30, "4.0 GiB"),
        (1 << 52, "4096.0 TiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
