"""One server or engine per architecture; all its adapters and the base model are asked in one batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from architectures import Architecture
from features import FEATURES, attach, save
from offline import TOKENS, run_offline
from server import BASE, Completion, Server
from tiny import VOCAB

PROMPTS = [torch.randint(3, VOCAB - 3, (size,), generator=torch.Generator().manual_seed(size)).tolist()
           for size in (5, 17, 40)]  # fmt: skip

MAX_RANK = 16


@dataclass
class Asked:
    """An architecture, its files, and what the server said.

    Attributes:
        architecture: which.
        model: the folder of the model in transformers.
        served: the folder that is served.
        adapters: the folder of each feature's adapter.
        states: how the admin endpoint sees each adapter; empty without a server.
        answers: of each feature that is served, and of the base model, by its name.
        refusals: the code of each other one; None where it is not told.
    """

    architecture: Architecture
    model: Path
    served: Path
    adapters: dict[str, Path]
    states: dict[str, dict[str, Any]]
    answers: dict[str, list[Any]]
    refusals: dict[str, str | None]

    def reference(
        self, feature: str | None, answers: list[Any], dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        """What transformers with PEFT says of the answers to each prompt, computing in a dtype."""
        model = self._base if feature is None and dtype is torch.float32 else self._model(feature, dtype)
        return [self._values(model, *asked) for asked in zip(PROMPTS, answers, strict=True)]

    def _model(self, feature: str | None, dtype: torch.dtype) -> torch.nn.Module:
        model = self.architecture.load(self.model, dtype)
        return model if feature is None else attach(model, self.adapters[feature])

    @cached_property
    def _base(self) -> torch.nn.Module:
        return self.architecture.load(self.model)

    def _values(self, model: torch.nn.Module, prompt: list[int], answer: Any) -> torch.Tensor:
        tokens = prompt if self.architecture.pools else [*prompt, *answer.output]
        with torch.no_grad():
            output = model(torch.tensor([tokens]))
        if self.architecture.pools:
            return torch.nn.functional.normalize(
                output.last_hidden_state[0, self.architecture.pooled], dim=-1
            )
        rows = output.logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        return rows.gather(1, torch.tensor(answer.output)[:, None])[:, 0]


def served_value(answer: Any) -> torch.Tensor:
    """The numbers that are compared with the reference."""
    return torch.tensor(answer.logprobs if isinstance(answer, Completion) else answer)


def ask_server(architecture: Architecture, root: Path) -> Asked:
    """Write the model and its adapters, serve them, ask, stop the server."""
    model, served, adapters = _write(architecture, root)
    flags = ("--enforce-eager", "--max-loras", "4", "--max-lora-rank", str(MAX_RANK), *architecture.flags)
    server = Server(served, root / "adapters", root / "server.log", flags)
    try:
        server.start()
        states = {name: server.admin(f"/v1/adapters/{folder.name}")[1] for name, folder in adapters.items()}
        names = {BASE: BASE} | {n: adapters[n].name for n in adapters if states[n]["state"] == "listed"}
        answers = asyncio.run(_ask(server, architecture, names))
    finally:
        server.stop()
        print(server.tail(80))
    refusals = {name: states[name]["reason"]["code"] for name in adapters if name not in names}
    return Asked(architecture, model, served, adapters, states, answers, refusals)


def ask_offline(architecture: Architecture, root: Path) -> Asked:
    """The same of an engine without a server, which is quicker; adapters are named by their paths."""
    model, served, adapters = _write(architecture, root)
    asked = Asked(architecture, model, served, adapters, {}, {}, {})
    folders = {BASE: None, **{name: str(folder) for name, folder in adapters.items()}}
    replies = iter(
        run_offline(
            served, list(folders.values()), PROMPTS, MAX_RANK, architecture.pools, architecture.dtype, root
        )
    )
    for prompt in PROMPTS:
        for name in folders:
            reply = next(replies)
            if "refusal" in reply:
                asked.refusals[name] = reply["refusal"]
            elif architecture.pools:
                asked.answers.setdefault(name, []).append(reply["embedding"])
            else:
                answer = Completion(prompt, reply["tokens"], reply["logprobs"], "")
                asked.answers.setdefault(name, []).append(answer)
    return asked


def _write(architecture: Architecture, root: Path) -> tuple[Path, Path, dict[str, Path]]:
    model = architecture.make(root / "model")
    (root / "adapters").mkdir()
    adapters = {
        name: save(feature, architecture, architecture.load(model), root / "adapters" / f"a{index}", index)
        for index, (name, feature) in enumerate(FEATURES.items())
        if feature.fits(architecture)
    }
    return model, architecture.serve(model), adapters


async def _ask(server: Server, architecture: Architecture, names: dict[str, str]) -> dict[str, list[Any]]:
    async def embed(model: str, prompt: list[int]) -> list[float]:
        async with server.async_client as client:
            answer = await client.embeddings.create(model=model, input=prompt, encoding_format="float")
        return answer.data[0].embedding

    async def one(model: str, prompt: list[int]) -> Any:
        if architecture.pools:
            return await embed(model, prompt)
        return await server.complete_async(model, prompt, TOKENS)

    questions = [(name, prompt) for prompt in PROMPTS for name in names]
    replies = await asyncio.gather(*(one(names[name], prompt) for name, prompt in questions))
    answers: dict[str, list[Any]] = {name: [] for name in names}
    for (name, _), reply in zip(questions, replies, strict=True):
        answers[name].append(reply)
    return answers
