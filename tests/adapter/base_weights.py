"""The base model as staging sees it, over a transformers model's weights: cut as the layout says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lora_plugin.adapter.base_model import Task
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import Kind, Layer, ModelLayout


class WeightsOf:
    """A `BaseLayer` with the weights themselves at hand, float32."""

    adds_bias = True

    def __init__(self, model: nn.Module, layer: Layer) -> None:
        parts = [model.get_submodule(part.name) for part in layer.slices]
        cuts = [(slice(*part.out_shard), slice(*part.in_shard)) for part in layer.slices]
        weights = [m.weight.T if layer.kind is Kind.EMBEDDING else m.weight for m in parts]
        self.weight = torch.cat([w[cut].detach().float() for w, cut in zip(weights, cuts, strict=True)])
        self.is_embedding = layer.kind is Kind.EMBEDDING
        self.bias: Tensor | None = None
        if any(getattr(part, "bias", None) is not None for part in parts):
            biases = [part.bias.detach().float() for part in parts]
            self.bias = torch.cat([bias[rows] for bias, (rows, _) in zip(biases, cuts, strict=True)])

    def products(self, x: Tensor) -> Task:
        yield
        return x.float() @ self.weight.T

    def rows(self, tokens: Tensor) -> Task:
        yield
        return (self.weight.T if self.is_embedding else self.weight)[tokens]

    def squared_norms(self) -> Task:
        yield
        return self.weight.square().sum(1)


class WeightsModel:
    """A `BaseModel` whose tasks run at once."""

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        self._model = model
        self.layers = tuple(WeightsOf(model, layer) for layer in layout.layers)

    @property
    def parameters(self) -> list[str]:
        return [name for name, _ in self._model.named_parameters()]

    def parameter(self, name: str) -> Task:
        yield
        parameters = dict(self._model.named_parameters())
        if name not in parameters:
            raise AdapterRejected(Code.FEATURE_UNSUPPORTED, f"the model has no {name}")
        return parameters[name].detach().float()

    def run(self, tasks: Sequence[Task]) -> list[Tensor]:
        return [finish(task) for task in tasks]


def finish(task: Task) -> Tensor:
    """A task's result."""
    while True:
        try:
            next(task)
        except StopIteration as done:
            result: Tensor = done.value
            return result
