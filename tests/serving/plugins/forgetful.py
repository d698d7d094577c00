"""A worker whose device memory can be lost as level-2 sleep loses it on a GPU; a CPU has no such sleep."""

from __future__ import annotations

from typing import Any


class Forgetful:
    """For vLLM's `--worker-extension-cls`."""

    model_runner: Any

    def lose_adapters(self) -> None:
        """Whatever lies where the adapters were: NaN."""
        for weights in self.model_runner.lora_manager.arena.weights:
            for tensor in (weights.a, *weights.b):
                tensor.fill_(float("nan"))
