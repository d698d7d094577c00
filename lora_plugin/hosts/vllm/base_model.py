"""The base model of a worker as staging sees it: its layers, and turns on the thread of the steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none

from lora_plugin.adapter.base_model import Task
from lora_plugin.adapter.document import show
from lora_plugin.adapter.targets import core_name
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.hosts.vllm.base_layer import NORMS, HostLayer, squared_row_norms
from lora_plugin.hosts.vllm.config import active
from lora_plugin.hosts.vllm.layers import Wrapped
from lora_plugin.worker.between_steps import BetweenSteps


class HostModel:
    """The `BaseModel` of a worker.

    Args:
        model: the host's model, its layers wrapped.
        wrapped: the layers in the layout's order.
        dtype, device: what the model computes in, and where.

    Attributes:
        work: what is waiting for the thread of the steps.
    """

    def __init__(
        self, model: nn.Module, wrapped: Sequence[Wrapped], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model, self._wrapped, self._dtype, self._device = model, tuple(wrapped), dtype, device
        self.work = BetweenSteps()
        self.reset()

    def reset(self) -> None:
        """Its weights are others now: what is known of them, and what is being computed, is of no use."""
        self.layers = tuple(HostLayer(each, self._dtype, self._device) for each in self._wrapped)

    @property
    def parameters(self) -> list[str]:
        return [name for name, _ in self._model.named_parameters()]

    def parameter(self, name: str) -> Task:
        found = [p for n, p in self._model.named_parameters() if core_name(n) == core_name(name)]
        if len(found) != 1 or not found[0].is_floating_point():
            raise AdapterRejected(
                Code.FEATURE_UNSUPPORTED,
                f"modules_to_save: the model has no {show(name)} that could be compared",
                hint="merge the adapter into the base model, or train it without this module",
            )
        yield
        return found[0].detach().float()

    def run(self, tasks: Sequence[Task]) -> list[Tensor]:
        return self.work.run([_to_host(task) for task in tasks])

    @torch.inference_mode()
    def advance(self, seconds: float) -> None:
        """On the thread of the steps: a little of what is waiting."""
        self.work.advance(seconds)


def _to_host(task: Task) -> Task:
    """A task whose result is brought to the host, without ever waiting for the device."""
    result = yield from task
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=result.is_cuda)
    host.copy_(result, non_blocking=True)
    if result.is_cuda:
        arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        while not arrived.query():
            yield
    return host


def keep_norms(original: Callable[..., None]) -> Callable[..., None]:
    """Around the CPU's packing of weights, which frees them: the norms of their rows are kept."""

    @functools.wraps(original)
    def dispatch(layer: nn.Module, remove_weight: bool) -> None:
        config = get_current_vllm_config_or_none()
        weight: Any = layer.weight
        freed = remove_weight and weight.dim() == 2 and not weight.is_meta
        if freed and config is not None and active(config):
            setattr(layer, NORMS, squared_row_norms(weight))
        original(layer, remove_weight)

    return dispatch
