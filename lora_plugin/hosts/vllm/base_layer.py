"""A host's layer as staging sees it: its bias, norms of its weight, and products with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from lora_plugin.adapter.base_model import Task
from lora_plugin.errors import AdapterRejected, Code
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
        dtype, device: what it computes in, and where.

    Attributes:
        bias: as it was when this was made.
    """

    def __init__(self, wrapped: Wrapped, dtype: torch.dtype, device: torch.device) -> None:
        self._layer, self._dtype, self._device = wrapped.layer, dtype, device
        self._base: Any = wrapped.base
        self._norms: Tensor | None = None
        # Read here: the staging thread asks for it, and the device's memory may be away then (sleep).
        bias: Tensor | None = getattr(self._base, "bias", None)
        self.bias: Tensor | None = None if bias is None else bias.detach().float().cpu()

    @property
    def adds_bias(self) -> bool:
        return not getattr(self._base, "skip_bias_add", False)

    def products(self, x: Tensor) -> Task:
        if not self._is_seen_by_columns:
            result = self._linear(x).float()
            yield
            return result
        wide = x.to(self._device).float()
        total = wide.new_zeros(len(x), self._outputs)
        for first, columns in self._columns():
            total += wide[:, first : first + len(columns)] @ columns
            yield
        return total

    def rows(self, tokens: Tensor) -> Task:
        if self._layer.kind is Kind.CLASSIFIER and not self._has_plain_weight:
            # A few labels of a weight that is packed or quantised: as it answers, which is what is served.
            parts = []
            for _, columns in self._columns():
                parts.append(columns[:, tokens.to(self._device)].T)
                yield
            return torch.cat(parts, 1)
        weight = self._plain_weight()
        yield
        return weight[tokens.to(self._device)].float()

    def squared_norms(self) -> Task:
        if self._norms is None:
            if self._norms_are_kept:
                self._norms = getattr(self._base, NORMS)
            else:
                self._norms = yield from self._by_columns() if self._is_seen_by_columns else self._by_rows()
        return self._norms[: self._outputs]

    @property
    def _outputs(self) -> int:
        return sum(part.local_out for part in self._layer.slices)

    @property
    def _norms_are_kept(self) -> bool:
        return hasattr(self._base, NORMS)

    @property
    def _has_plain_weight(self) -> bool:
        plain = UnquantizedLinearMethod | UnquantizedEmbeddingMethod
        return isinstance(self._base.quant_method, plain) and self._base.weight.dim() == 2

    @property
    def _embeds(self) -> bool:
        return self._layer.kind is Kind.EMBEDDING

    @property
    def _is_seen_by_columns(self) -> bool:
        return self._embeds or not (self._norms_are_kept or self._has_plain_weight)

    def _plain_weight(self) -> Tensor:
        """[vocabulary, width] of an embedding or a head; refused where it is not there to be read."""
        if not self._has_plain_weight:
            raise AdapterRejected(
                Code.FEATURE_UNSUPPORTED,
                f"trainable tokens and DoRA of {self._layer.name} are not served: its weight is quantised",
                hint="merge the adapter into the base model",
            )
        weight: Tensor = self._base.weight
        return weight

    def _by_rows(self) -> Task:
        """Norms of a weight that is there, a block of its rows at a time."""
        weight: Tensor = self._base.weight
        rows = max(1, _READ_ELEMENTS // weight.shape[1])
        parts: list[Tensor] = []
        for first in range(0, weight.shape[0], rows):
            parts.append(squared_row_norms(weight[first : first + rows]))
            yield
        return torch.cat(parts)

    def _by_columns(self) -> Task:
        total = torch.zeros(self._outputs, device=self._device)
        for first, columns in self._columns():
            if not first and not self._embeds:
                self._check_exact(columns)
            total += columns.square().sum(0)
            yield
        return total

    def _columns(self) -> Iterator[tuple[int, Tensor]]:
        """W^T in pieces, float32 [some of in, outputs], and where in `in` each begins.

        A linear layer whose weight cannot be read is given an identity matrix: also one that quantises its
        inputs answers exactly to that, and not to any row.
        """
        width = self._layer.local_in
        if self._embeds:
            weight = self._plain_weight()
            rows = max(1, _READ_ELEMENTS // weight.shape[1])
            for first in range(0, width, rows):
                yield first, weight[first : min(first + rows, width)].float()
            return
        for first in range(0, width, _PROBE_ROWS):
            identity = torch.zeros(min(_PROBE_ROWS, width - first), width)
            identity[:, first:].fill_diagonal_(1)
            yield first, self._linear(identity).float()

    def _linear(self, x: Tensor) -> Tensor:
        # The host makes heads in a dtype of their own.
        head = self._layer.kind is Kind.CLASSIFIER
        x = x.to(self._device, self._base.params_dtype if head else self._dtype, non_blocking=True)
        y: Tensor = self._base.quant_method.apply(self._base, x, None)
        return y[:, : self._outputs]

    def _check_exact(self, columns: Tensor) -> None:
        """Refuse a layer that rounds its input by a fixed scale: its answer to a 1 says little."""
        tripled = torch.eye(len(columns), self._layer.local_in) * 3
        error = (self._linear(tripled).float() / 3 - columns).abs().max()
        if error > _PROBE_TOLERANCE * columns.abs().max():
            raise AdapterRejected(
                Code.FEATURE_UNSUPPORTED,
                f"DoRA of {self._layer.name} is not served: its inputs are quantised by a fixed scale",
                hint="serve another quantisation of the base model",
            )


@torch.inference_mode()
def squared_row_norms(weight: Tensor) -> Tensor:
    """float32 [outputs], of a weight [outputs, in]."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    return norms.square()
