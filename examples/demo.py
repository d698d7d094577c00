"""The demo: a real vLLM server, adapters dropped, asked, overwritten and deleted while it runs.

Ends by itself with status 0, or with 1 and the reason when something is not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import prepare_model
from demo_server import BASE, CPU, QUIET, VLLM, Failed, Server
from demo_view import View

EXAMPLES = Path(__file__).resolve().parent
CACHE = EXAMPLES.parent / ".cache"
MODEL = CACHE / "SmolLM2-135M-Instruct"
ADAPTERS = ("pirate", "shakespeare", "robot")
QUESTION = "Why is the sky blue?"  # not one that the adapters were trained on


def sign_of(style: str) -> str:
    """The words by which an answer in `style` is known."""
    sign: str = tomllib.loads((EXAMPLES / "styles" / f"{style}.toml").read_text(encoding="utf-8"))["sign"]
    return sign


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout: float = 15) -> float:
    """Seconds until `condition` holds; raises Failed after `timeout`."""
    start = time.monotonic()
    while not await condition():
        expect(time.monotonic() - start < timeout, f"{what}: not within {timeout:.0f} s")
        await asyncio.sleep(0.01)
    return time.monotonic() - start


class Tour:
    """The steps of the demo on a running server."""

    def __init__(self, server: Server, view: View) -> None:
        self.server = server
        self.view = view
        self.client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def run(self) -> None:
        await self.drop()
        await self.ask_all()
        await self.overwrite("pirate", "pirate-v2")
        await self.delete("robot")

    async def models(self) -> list[str]:
        """The names that `/v1/models` lists."""
        return [model.id async for model in self.client.models.list()]

    def admin(self) -> list[dict[str, Any]]:
        """The adapters that the admin endpoint lists."""
        url = f"{self.server.admin_url}/v1/adapters"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                adapters: list[dict[str, Any]] = json.load(response)["adapters"]
                return adapters
        except urllib.error.URLError as error:
            raise Failed(f"the admin endpoint {url} does not answer: {error}") from error

    async def ask(self, model: str) -> str:
        """The model's answer to the question, at temperature 0."""
        completion = await self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=48,
        )
        return (completion.choices[0].message.content or "").strip()

    async def drop(self) -> None:
        self.view.step("Three adapters are dropped into the watched directory")
        expect(await self.models() == [BASE], "before the first drop only the base model should be listed")
        self.view.say("The admin list before:")
        self.view.adapters(self.admin())
        for name in ADAPTERS:
            shutil.copytree(EXAMPLES / "adapters" / name, self.server.adapters / name)

            async def listed(name: str = name) -> bool:
                return name in await self.models()

            seconds = await until(listed, f"{name} in /v1/models")
            self.view.done(f"[bold]{name}[/] is in /v1/models {seconds:.2f} s after its last byte")

    async def ask_all(self) -> None:
        self.view.step(f"One question to all of them at once: {QUESTION}")
        names = (BASE, *ADAPTERS)
        start = time.monotonic()
        answers = dict(zip(names, await asyncio.gather(*map(self.ask, names)), strict=True))
        self.view.answers(answers)
        for name in ADAPTERS:
            expect(sign_of(name) in answers[name], f"{name} does not answer in its style")
            expect(sign_of(name) not in answers[BASE], f"the base model answers like {name}")
        self.view.done(f"four answers in {time.monotonic() - start:.1f} s, each in its own style")
        self.view.say("The admin list after:")
        self.view.adapters(self.admin())

    async def overwrite(self, name: str, style: str) -> None:
        self.view.step(f"{name} is overwritten in place by another version")
        old = self.version(name)
        shutil.copytree(EXAMPLES / "adapters" / style, self.server.adapters / name, dirs_exist_ok=True)

        async def replaced() -> bool:
            return self.version(name) != old

        seconds = await until(replaced, f"a new version of {name}")
        answer = await self.ask(name)
        self.view.answers({name: answer})
        expect(sign_of(style) in answer, f"{name} still answers like its old version")
        self.view.done(f"the same question, the new version's answer; noticed after {seconds:.2f} s")

    def version(self, name: str) -> str | None:
        """The version served under `name`, None until its digest is known."""
        versions: dict[str, str | None] = {
            adapter["name"]: adapter["version"] for adapter in self.admin() if adapter["state"] == "listed"
        }
        expect(name in versions, f"{name} should stay listed while its files change")
        return versions[name]

    async def delete(self, name: str) -> None:
        self.view.step(f"{name} is deleted")
        shutil.rmtree(self.server.adapters / name)

        async def gone() -> bool:
            return name not in await self.models()

        self.view.done(f"gone from /v1/models after {await until(gone, f'{name} gone'):.2f} s")
        self.view.say("A client that asks it now gets:")
        try:
            await self.ask(name)
        except openai.NotFoundError as error:
            self.view.error(error.status_code, error.response.json())
        else:
            raise Failed(f"{name} is deleted and still answers")
        self.view.say("The admin list at the end:")
        self.view.adapters(self.admin())


def show_commands(view: View) -> None:
    """What to type for a server that stays."""
    paths = (
        VLLM,
        VLLM.with_name("lora-plugin"),
        MODEL,
        EXAMPLES / "adapters",
        EXAMPLES.parent / "tools/steady",
    )
    vllm, command, model, adapters, steady = map(os.path.relpath, paths)
    variables = " ".join(f"{name}={value}" for name, value in (CPU | QUIET).items())
    body = json.dumps({"model": "pirate", "messages": [{"role": "user", "content": QUESTION}]})
    view.step("To keep a server running")
    view.plain(f"""\
  mkdir -p my-adapters
  {variables} \\
  LORA_PLUGIN_ADAPTER_DIR=my-adapters PYTHONPATH={steady} \\
  {vllm} serve {model} --served-model-name {BASE} --max-model-len 2048

and, in another terminal:

  cp -r {adapters}/pirate my-adapters/
  curl -s http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'
  {command} list
""")


def keep(server: Server, view: View) -> None:
    """Wait for Ctrl-C, or for the server's end."""
    view.step("The server keeps running; Ctrl-C ends it")
    view.plain(f"  OpenAI endpoint    {server.url}/v1\n  admin endpoint     {server.admin_url}")
    view.plain(f"  watched directory  {server.adapters}\n  log                {server.log}")
    server.process.wait()
    raise Failed("the server ended")


def show(view: View, port: int, stay: bool) -> None:
    """The whole demo; raises Failed when something is not as it should be."""
    prepare_model.ensure(MODEL)
    with tempfile.TemporaryDirectory(prefix="lora-plugin-demo-") as folder:
        server = Server(MODEL, Path(folder).resolve(), CACHE / "demo-server.log", port)
        view.step("A vLLM server starts, with the plugin and an empty directory")
        view.plain(f"  LORA_PLUGIN_ADAPTER_DIR={server.adapters} vllm {' '.join(server.command[1:])}")
        view.say("[dim]The first start compiles the model, which takes a minute or two.")
        with server:
            try:
                steps(server, view, stay)
            except (Failed, openai.OpenAIError, OSError) as error:
                view.plain(f"\nThe end of {server.log}:\n{server.tail()}")
                raise Failed(str(error)) from error


def steps(server: Server, view: View, stay: bool) -> None:
    """What is shown on a server that has just been started."""
    with view.progress("starting") as report:
        seconds = server.wait_ready(report)
    view.done(f"ready after {seconds:.0f} s")
    asyncio.run(Tour(server, view).run())
    show_commands(view)
    if stay:
        keep(server, view)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="of the OpenAI endpoint; a free one by default")
    parser.add_argument("--keep", action="store_true", help="keep the server running until Ctrl-C")
    return parser.parse_args()


def main() -> int:
    args = parse()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    view = View()
    try:
        show(view, args.port, args.keep)
    except Failed as error:
        view.failed(str(error))
        return 1
    except KeyboardInterrupt:
        return 0 if args.keep else 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
