"""The host's layers as staging sees them: their biases, norms of their weights, and products with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from lora_plugin.base_model import Task
from lora_plugin.between_steps import BetweenSteps
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.hosts.vllm.config import active
from lora_plugin.hosts.vllm.layers import Wrapped
from lora_plugin.layout import Kind

NORMS = "lora_plugin_squared_norms"
_READ_ELEMENTS = 1 << 22
_PROBE_ROWS = 64
_PROBE_TOLERANCE = 2**-6


class HostLayer:
    """A `BaseLayer` over a wrapped layer; but for `bias`, only for the thread of the steps.

    Args:
        wrapped: the layer.
        dtype: what it computes in.
    """

    def __init__(self, wrapped: Wrapped, dtype: torch.dtype) -> None:
        self._layer, self._dtype = wrapped.layer, dtype
        self._base: Any = wrapped.base
        self._norms: Tensor | None = None

    @functools.cached_property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = getattr(self._base, "bias", None)
        return None if bias is None else bias.detach().float().cpu()

    @property
    def adds_bias(self) -> bool:
        return not getattr(self._base, "skip_bias_add", False)

    def linear(self, x: Tensor) -> Tensor:
        x = x.to(self._device, self._dtype, non_blocking=True)
        if self._layer.kind is Kind.EMBEDDING:
            weight: Tensor = self._base.weight
            return x @ weight[: self._layer.local_in]
        y: Tensor = self._base.quant_method.apply(self._base, x, None)
        return y[:, : sum(part.local_out for part in self._layer.slices)]

    def rows(self, tokens: Tensor) -> Task:
        if not self._has_plain_weight:
            raise AdapterRejected(
                Code.FEATURE_UNSUPPORTED,
                f"trainable tokens of {self._layer.name} are not served: its weight is quantised",
                hint="merge the adapter into the base model",
            )
        weight: Tensor = self._base.weight
        yield
        return weight[tokens.to(self._device)].float()

    def squared_norms(self) -> Task:
        if self._norms is None:
            kept: Tensor | None = getattr(self._base, NORMS, None)
            if kept is None:
                kept = yield from self._read() if self._has_plain_weight else self._probe()
            self._norms = kept
        return self._norms[: sum(part.local_out for part in self._layer.slices)]

    @property
    def _device(self) -> torch.device:
        parameter: Tensor = next(self._base.parameters())
        return parameter.device

    @property
    def _has_plain_weight(self) -> bool:
        plain = UnquantizedLinearMethod | UnquantizedEmbeddingMethod
        return isinstance(self._base.quant_method, plain) and self._base.weight.dim() == 2

    def _read(self) -> Task:
        """Norms of a weight that is there, a block of rows at a time; an embedding's are its inputs."""
        weight: Tensor = self._base.weight
        embeds = self._layer.kind is Kind.EMBEDDING
        rows = max(1, _READ_ELEMENTS // weight.shape[1])
        parts: list[Tensor] = []
        whole = weight[: self._layer.local_in] if embeds else weight
        for first in range(0, whole.shape[0], rows):
            block = whole[first : first + rows]
            parts.append(_squared_norms(block, dim=0 if embeds else 1))
            yield
        return torch.stack(parts).sum(0) if embeds else torch.cat(parts)

    def _probe(self) -> Task:
        """Norms of a weight that cannot be read: from what the layer makes of an identity matrix."""
        width = self._layer.local_in
        total: Tensor | None = None
        for start in range(0, width, _PROBE_ROWS):
            rows = torch.eye(width, device=self._device, dtype=self._dtype)[start : start + _PROBE_ROWS]
            columns = self.linear(rows).float()
            if total is None:
                total = torch.zeros_like(columns[0])
                self._check_exact(rows, columns)
            total += columns.square().sum(0)
            yield
        assert total is not None
        return total

    def _check_exact(self, rows: Tensor, columns: Tensor) -> None:
        """Refuse a layer that rounds its input by a fixed scale: its answer to a 1 says little."""
        error = (self.linear(rows * 3).float() / 3 - columns).abs().max()
        if error > _PROBE_TOLERANCE * columns.abs().max():
            raise AdapterRejected(
                Code.FEATURE_UNSUPPORTED,
                f"DoRA of {self._layer.name} is not served: its inputs are quantised by a fixed scale",
                hint="serve another quantisation of the base model",
            )


class HostModel:
    """The `BaseModel` of a worker.

    Args:
        wrapped: the layers in the layout's order.
        dtype: what the model computes in.

    Attributes:
        work: what is waiting for the thread of the steps.
    """

    def __init__(self, wrapped: Sequence[Wrapped], dtype: torch.dtype) -> None:
        self.layers = tuple(HostLayer(each, dtype) for each in wrapped)
        self.work = BetweenSteps()

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
            setattr(layer, NORMS, _squared_norms(weight, dim=1))
        original(layer, remove_weight)

    return dispatch


@torch.inference_mode()
def _squared_norms(weight: Tensor, dim: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(weight, dim=dim, dtype=torch.float32)
    return norms.square()
