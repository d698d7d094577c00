"""The real vLLM server as a child process: started on free ports, always stopped with all its children."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

VLLM = Path(sys.executable).with_name("vllm")
BASE = "smollm2"
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; no effect on a GPU
INFO_LINE = re.compile(r"(?:\(.*?\) )?INFO [-\d]+ [:\d]+ \[.*?\] (?P<text>\w.*)")


class Failed(Exception):
    """Something in the demo is not as it should be; the message says what."""


def free_port(port: int = 0) -> int:
    """`port` of the loopback interface, 0 for any; raises Failed when somebody listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise Failed(f"port {port} cannot be used: {error.strerror}") from None
        free: int = probe.getsockname()[1]
        return free


class Server:
    """`vllm serve` with the plugin on a watched directory; a context manager.

    Args:
        model: the base model's folder.
        adapters: the directory that the plugin watches.
        log: the file that takes everything the server writes.
        port: of the OpenAI endpoint; 0 takes a free one.
    """

    def __init__(self, model: Path, adapters: Path, log: Path, port: int = 0) -> None:
        self.adapters = adapters
        self.log = log
        self.port = free_port(port)
        self.admin_port = free_port()
        self.command = [str(VLLM), "serve", str(model)]
        self.command += ["--served-model-name", BASE, "--max-model-len", "2048"]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def environment(self) -> dict[str, str]:
        """The caller's, without plugin settings of his own, which would change what is shown."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LORA_PLUGIN_")}
        kept.pop("NIM_PEFT_SOURCE", None)
        plugin = {
            "LORA_PLUGIN_ADAPTER_DIR": str(self.adapters),
            "LORA_PLUGIN_ADMIN_PORT": str(self.admin_port),
        }
        return kept | QUIET | CPU | plugin

    def __enter__(self) -> Self:
        if not VLLM.exists():
            raise Failed(f"there is no {VLLM}: run `make setup` first")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            # A session of its own, so that one signal reaches the engine's processes too.
            self.process = subprocess.Popen(
                self.command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.signal_all(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        finally:  # also when an impatient second Ctrl-C ends the waiting
            self.signal_all(signal.SIGKILL)
            self.process.wait()

    def signal_all(self, number: signal.Signals) -> None:
        """To every process of the server that is left."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait_ready(self, report: Callable[[float, str], None], timeout: float = 900) -> float:
        """Seconds until `/health` answers; `report(seconds, last line of the log)` is called meanwhile.

        Raises:
            Failed: the server ended, or was not ready in time.
        """
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < timeout:
            if self.process.poll() is not None:
                raise Failed(f"the server ended with status {self.process.returncode}")
            if self.healthy():
                return elapsed
            report(elapsed, self.last_line())
            time.sleep(0.25)
        raise Failed(f"the server was not ready within {timeout:.0f} s")

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def tail(self, lines: int = 25) -> str:
        """The end of the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def last_line(self) -> str:
        """What the server did last, without process, time and source file."""
        lines = [found["text"] for line in self.tail().splitlines() if (found := INFO_LINE.match(line))]
        return lines[-1] if lines else ""
