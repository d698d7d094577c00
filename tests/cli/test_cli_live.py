"""serve, watch, top, completion, confirmation: what has a life of its own."""

from __future__ import annotations

import json
import os
import pty
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import PROGRAM, environment, run
from memory_operations import MemoryOperations

from lora_plugin.admin.app import create_app
from lora_plugin.admin.server import AdminServer
from lora_plugin.cli import main
from lora_plugin.directory.events import EventKind, EventLog

FAKE_HOST = """#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], os.environ.get("LORA_PLUGIN_ADAPTER_DIR"), os.getpid()]))
sys.exit(7)
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A command `vllm` that says what it was given."""
    command = tmp_path / "bin/vllm"
    command.parent.mkdir()
    command.write_text(FAKE_HOST.format(python=sys.executable))
    command.chmod(0o755)
    return command


def _serve(host: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = (
        f"import sys; sys.executable = {str(host.with_name('python'))!r}\n"
        "from lora_plugin.cli import main; sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", script, "serve", *arguments],
        capture_output=True,
        text=True,
        env=environment(**variables),
        timeout=60,
    )


def test_serve_refuses_a_certificate_that_cannot_be_used(host: Path, tmp_path: Path) -> None:
    result = _serve(
        host, "--adapters", str(tmp_path), "some/model", LORA_PLUGIN_ADMIN_TLS_CERT=str(tmp_path / "none.pem")
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "none.pem: No such file" in result.stderr


def test_serve_hands_over_to_the_host(host: Path, tmp_path: Path) -> None:
    flags = ["org/model", "--port", "8001", "--max-loras", "2", "--enforce-eager", "-tp", "1"]
    result = _serve(host, "--adapters", str(tmp_path), *flags)
    words, directory, _ = json.loads(result.stdout)
    assert (words, directory) == (["serve", *flags], str(tmp_path))
    assert result.returncode == 7
    mixed = _serve(host, "org/model", "--adapters", str(tmp_path), "--port", "8001")
    assert json.loads(mixed.stdout)[0] == ["serve", "org/model", "--port", "8001"]


def test_serve_refuses_what_the_start_would_refuse(host: Path, tmp_path: Path) -> None:
    wrong = _serve(host, "m", LORA_PLUGIN_ADAPTER_DIR=str(tmp_path), LORA_PLUGIN_WATCH="often")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "LORA_PLUGIN_WATCH" in wrong.stderr
    unset = _serve(host, "m")
    assert (unset.returncode, unset.stdout) == (2, "")
    assert "--adapters DIR" in unset.stderr


def test_serve_without_the_host(tmp_path: Path) -> None:
    result = _serve(tmp_path / "vllm", "m", "--adapters", str(tmp_path), PATH="/nonexistent")
    assert result.returncode == 2
    assert "no command vllm" in result.stderr


def test_watch_as_json_lines(url: str) -> None:
    result = run("watch", "--after", "0", "--count", "2", "--admin", url)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(event["kind"], event["name"]) for event in events] == [("discovered", "sql"), ("listed", "sql")]
    rest = run("watch", "--after", events[0]["id"], "--count", "1", "--format", "quiet", "--admin", url)
    assert rest.stdout == "sql\n"


def test_watch_goes_on_after_a_restart(operations: MemoryOperations) -> None:
    first, second = EventLog(), EventLog()
    server, address = _started(operations, first, 0)
    command = subprocess.Popen(
        [*PROGRAM, "watch", "--format", "quiet", "--after", "0", "--count", "3",
         "--admin", f"http://127.0.0.1:{address[1]}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        _record(first, "before")
        assert command.stdout is not None
        assert command.stdout.readline() == "before\n"
        server.stop()
        _record(second, "meanwhile")
        server, _ = _started(operations, second, address[1])
        output, words = command.communicate(timeout=60)
    finally:
        command.kill()
        server.stop()
    assert (output, command.returncode) == ("meanwhile\n", 0)
    assert "trying again" in words


def _started(operations: MemoryOperations, log: EventLog, port: int) -> tuple[AdminServer, tuple[str, int]]:
    server = AdminServer(lambda: create_app(operations, events=log), "127.0.0.1", port)
    address = server.start()
    assert address is not None
    return server, address


def _record(log: EventLog, name: str) -> None:
    log.record(EventKind.LISTED, name, time=5.0)
    log.deliver()


def test_watch_without_a_server_is_no_answer() -> None:
    assert run("watch", "--admin", "http://127.0.0.1:9").returncode == 3


def hear_interrupts() -> None:
    """What a shell starts in the background ignores them, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_is_no_fault(url: str) -> None:
    command = subprocess.Popen(
        [*PROGRAM, "watch", "--format", "quiet", "--after", "0", "--admin", url],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        preexec_fn=hear_interrupts,
    )  # fmt: skip
    assert command.stdout is not None
    command.stdout.readline()
    command.send_signal(signal.SIGINT)
    _, words = command.communicate(timeout=60)
    assert (command.returncode, words) == (130, "")


def test_whoever_reads_may_stop_reading(url: str) -> None:
    script = f"{sys.executable} -c '{PROGRAM[2]}' list --format human --admin {url} | head -n 1"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("answer", "code", "state"), [("y", 0, "unloaded"), ("", 1, "listed")])
def test_what_destroys_asks_first(
    answer: str, code: int, state: str, url: str, operations: MemoryOperations
) -> None:
    """On a terminal, which is what a pseudo-terminal is."""
    controller, terminal = pty.openpty()
    command = subprocess.Popen(
        [*PROGRAM, "unload", "sql", "--admin", url],
        stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    os.close(terminal)
    os.write(controller, f"{answer}\n".encode())
    _, words = command.communicate(timeout=60)
    os.close(controller)
    assert words.startswith("lora-plugin: stop serving sql until its files change? [y/N] ")
    assert (command.returncode, operations.views["sql"].state) == (code, state)


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_the_commands(shell: str) -> None:
    result = run("completion", shell)
    assert result.returncode == 0
    assert "unload" in result.stdout
    assert "unpin" in result.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True, timeout=60)


@pytest.mark.parametrize(("arguments", "package"), [(["completion", "bash"], "shtab"), (["top"], "rich")])
def test_a_missing_extra_is_named(
    arguments: list[str], package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert f"this needs {package}: pip install 'vllm-lora-plugin[cli]'" in capsys.readouterr().err


def test_the_own_certificate_is_trusted(operations: MemoryOperations, tmp_path: Path) -> None:
    cert = tmp_path / "both.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), *names, "-out", cert, "-keyout", tmp_path / "key.pem"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, tmp_path / "key.pem")
    server = AdminServer(lambda: create_app(operations), "127.0.0.1", 0, context)
    address = server.start()
    assert address is not None
    port = str(address[1])
    try:
        trusting = run("list", LORA_PLUGIN_ADMIN_PORT=port, LORA_PLUGIN_ADMIN_TLS_CERT=str(cert))
        assert trusting.returncode == 0, trusting.stderr
        doubting = run("list", "--admin", f"https://127.0.0.1:{port}")
        assert doubting.returncode == 3
        assert "its certificate is not trusted: self-signed certificate" in doubting.stderr
        assert "hint: LORA_PLUGIN_ADMIN_TLS_CERT names a certificate to trust" in doubting.stderr
        plain = run("list", "--admin", f"http://127.0.0.1:{port}")
        assert plain.returncode == 3
        assert "hint: if it speaks https" in plain.stderr
    finally:
        server.stop()
