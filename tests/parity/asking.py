"""One server per architecture; all its adapters and the base model are asked in one batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from architectures import Architecture
from features import FEATURES, attach, save
from server import BASE, Completion, Server
from tiny import VOCAB

PROMPTS = [torch.randint(3, VOCAB - 3, (size,), generator=torch.Generator().manual_seed(size)).tolist()
           for size in (5, 17, 40)]  # fmt: skip
TOKENS = 8


@dataclass
class Asked:
    """An architecture, its files, and what the server said.

    Attributes:
        architecture: which.
        model: the folder of the model in transformers.
        served: the folder that is served.
        adapters: the folder of each feature's adapter.
        states: how the admin endpoint sees it.
        answers: of each feature that is served, and of the base model, by its name.
    """

    architecture: Architecture
    model: Path
    served: Path
    adapters: dict[str, Path]
    states: dict[str, dict[str, Any]]
    answers: dict[str, list[Any]]

    def reference(self, feature: str | None, answer: Any, prompt: list[int]) -> torch.Tensor:
        """What transformers with PEFT says in float32 of an answer to a prompt."""
        model = self.architecture.load(self.model)
        if feature is not None:
            model = attach(model, self.adapters[feature])
        tokens = prompt if self.architecture.pools else [*prompt, *answer.output]
        with torch.no_grad():
            output = model(torch.tensor([tokens]))
        if self.architecture.pools:
            return torch.nn.functional.normalize(output.last_hidden_state[0, -1], dim=-1)
        rows = output.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return rows.gather(1, torch.tensor(answer.output)[:, None])[:, 0]


def served_value(answer: Any) -> torch.Tensor:
    """The numbers that are compared with the reference."""
    return torch.tensor(answer.logprobs if isinstance(answer, Completion) else answer)


def ask_server(architecture: Architecture, root: Path) -> Asked:
    """Write the model and its adapters, serve them, ask, stop the server."""
    model = architecture.make(root / "model")
    (root / "adapters").mkdir()
    adapters = {
        name: save(feature, architecture, architecture.load(model), root / "adapters" / f"a{index}", index)
        for index, (name, feature) in enumerate(FEATURES.items())
        if feature.fits(architecture)
    }
    served = architecture.serve(model)
    flags = ("--enforce-eager", "--max-loras", "4", "--max-lora-rank", "16", *architecture.flags)
    server = Server(served, root / "adapters", root / "server.log", flags)
    try:
        server.start()
        states = {name: server.admin(f"/v1/adapters/{folder.name}")[1] for name, folder in adapters.items()}
        names = {BASE: BASE} | {n: adapters[n].name for n in adapters if states[n]["state"] == "listed"}
        answers = asyncio.run(_ask(server, architecture, names))
    finally:
        server.stop()
        print(server.tail(80))
    return Asked(architecture, model, served, adapters, states, answers)


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
