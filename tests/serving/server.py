"""A real vLLM server with the plugin, started as an operator would."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

BASE = "base"
_QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OPENAI_API_KEY": "none",
}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Completion:
    """One answer: token ids in and out, their log-probabilities, the text."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str | None = None


@dataclass
class Server:
    """A server process and what tests ask of it."""

    model: Path
    adapters: Path
    log: Path
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    admin_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float = 240) -> Server:
        """Start it and wait until it reports healthy."""
        settings = {
            "LORA_PLUGIN_ADAPTER_DIR": str(self.adapters),
            "LORA_PLUGIN_ADMIN_PORT": str(self.admin_port),
        }
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(self.model)]
        command += ["--served-model-name", BASE, "--port", str(self.port), "--host", "127.0.0.1"]
        command += ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "32", *self.flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **_QUIET, **settings, **self.env},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_for(self.healthy, timeout, "the server to be healthy")
        return self

    def stop(self) -> None:
        """End it and everything it started."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def kill(self) -> None:
        """End it as a crash does, and everything it started."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @functools.cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def healthy(self) -> bool:
        """Whether it answers; fails at once when the process has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
        try:
            return get(f"{self.url}/health")[0] == 200
        except OSError:
            return False

    def tail(self, lines: int = 60) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_for(self, condition: Callable[[], bool], timeout: float, what: str) -> float:
        """Poll until true; returns the seconds it took."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > timeout:
                raise AssertionError(f"waited {timeout:.0f} s for {what}:\n{self.tail()}")
            time.sleep(0.02)
        return time.monotonic() - started

    def models(self) -> list[str]:
        """The ids that /v1/models lists."""
        return [model.id for model in self.client.models.list()]

    def wait_listed(self, name: str, timeout: float = 10) -> float:
        return self.wait_for(lambda: name in self.models(), timeout, f"{name} to be listed")

    def wait_gone(self, name: str, timeout: float = 10) -> float:
        return self.wait_for(lambda: name not in self.models(), timeout, f"{name} to be gone")

    def complete(self, model: str, prompt: list[int], max_tokens: int = 12) -> Completion:
        """A greedy completion of a prompt of token ids."""
        answer = self.client.completions.create(**completion_request(model, prompt, max_tokens))
        return parse_completion(prompt, answer)

    async def complete_async(self, model: str, prompt: list[int], max_tokens: int = 12) -> Completion:
        """The same, concurrently with others."""
        async with self.async_client as client:
            answer = await client.completions.create(**completion_request(model, prompt, max_tokens))
        return parse_completion(prompt, answer)

    def admin(self, path: str, method: str = "GET") -> tuple[int, Any]:
        """Status and JSON of an admin route."""
        status, body = get(f"http://127.0.0.1:{self.admin_port}{path}", method)
        return status, json.loads(body)

    def drop(self, source: Path, name: str) -> Path:
        """Copy an adapter folder into the watched directory, file by file, as `cp -r` does."""
        target = self.adapters / name
        shutil.copytree(source, target)
        return target


def completion_request(model: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }


def parse_completion(prompt: list[int], answer: Any) -> Completion:
    choice = answer.choices[0]
    return Completion(
        prompt, choice.token_ids, choice.logprobs.token_logprobs, choice.text, choice.finish_reason
    )


def get(url: str, method: str = "GET", body: Any = None) -> tuple[int, bytes]:
    """Status and body of a request, whatever the status."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
