"""vLLM servers for the benchmarks: started side by side, so that their numbers come from one run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

_QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class BenchServer:
    """One server process, named for the table."""

    name: str
    model: Path
    log: Path
    flags: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, timeout: float = 600) -> None:
        """Start it and wait until it is healthy."""
        command = [
            str(Path(sys.executable).with_name("vllm")),
            "serve",
            str(self.model),
            "--port",
            str(self.port),
        ]
        command += ["--host", "127.0.0.1", "--served-model-name", "base", "--max-model-len", "2048"]
        command += ["--no-enable-prefix-caching", *self.flags]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("LORA_PLUGIN_", "NIM_PEFT_"))}
        with self.log.open("wb") as log:
            # No session of its own: Linux shares a core between sessions first, and only then by priority.
            self.process = subprocess.Popen(
                command, env={**clean, **_QUIET, **self.env}, stdout=log, stderr=log, process_group=0
            )
        deadline = time.monotonic() + timeout
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not start; see {self.log}")
            time.sleep(0.5)

    def bound_cores(self) -> set[int]:
        """The cores that its workers are bound to: where steps are computed, on a CPU."""
        assert self.process is not None
        bound: set[int] = set()
        for pid in (int(entry.name) for entry in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                ours = os.getpgid(pid) == self.process.pid
                # At a low priority: what was taken off these cores.
                if ours and not os.getpriority(os.PRIO_PROCESS, pid):
                    cores = os.sched_getaffinity(pid)
                    bound |= cores if cores < os.sched_getaffinity(self.process.pid) else set()
        return bound

    def freeze(self) -> None:
        """Take the processor away from it: an idle worker spins on the core that others are measured on."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it and everything it started."""
        if self.process is None:
            return
        self.thaw()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
