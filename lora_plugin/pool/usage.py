"""What an engine's adapters were used for: requests and tokens by name, adapters per step."""

from __future__ import annotations

from typing import Any

from lora_plugin.adapter.names import is_adapter_name
from lora_plugin.distribution import Distribution

MAX_NAMES = 200
OTHER = "other"
COMPOSED = "(composition)"
"""Clients spell these as they like: "a*0.5+b"."""

_ADAPTERS_PER_STEP = (0, 1, 2, 4, 8, 16, 32, 64)


class Usage:
    """Counters of one engine, on its thread. After `MAX_NAMES` names the rest count as "other"."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[int]] = {}
        self._steps = Distribution(_ADAPTERS_PER_STEP)

    def finished(self, name: str, prompt_tokens: int, generated_tokens: int) -> None:
        """A request for an adapter ended, however it did."""
        if not is_adapter_name(name):
            name = COMPOSED
        if name not in self._by_name and len(self._by_name) >= MAX_NAMES:
            name = OTHER
        counts = self._by_name.setdefault(name, [0, 0, 0])
        counts[0] += 1
        counts[1] += prompt_tokens
        counts[2] += generated_tokens

    def step(self, adapters: int) -> None:
        """A step was scheduled with requests of so many different adapters; 0: the base model's only."""
        self._steps.add(adapters)

    def to_dict(self) -> dict[str, Any]:
        """`by_name`: [requests, prompt tokens, generated tokens]; `steps`: a distribution."""
        return {"by_name": dict(self._by_name), "steps": self._steps.to_dict()}
