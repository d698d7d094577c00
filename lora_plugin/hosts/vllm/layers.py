"""The layers an adapter can change, wrapped so that they call the plugin's op after their base output.

The host's own wrapper classes keep what they are good at (bias, gather and reduce under tensor parallelism,
weight reloading); everything they store or compute for LoRA is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from vllm.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    LogitsProcessorWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.utils.multi_stream_utils import maybe_execute_in_parallel

from lora_plugin.kernels import expand, shrink
from lora_plugin.layout import PACKED, Kind, Layer, Slice

_OTHER_RANKS = "each tensor-parallel rank holds a part of the weight's rows or columns only"

lora_apply = torch.ops.lora_plugin.lora_apply.default
lora_embed = torch.ops.lora_plugin.lora_embed.default


class _ArenaLinear:
    """Mixed over a host wrapper: the adapter's part is one op on the base output, in place."""

    handle: int
    base_layer: nn.Module
    _get_quant_method: Callable[[], Any]
    _events: list[torch.cuda.Event]
    _lora_stream: torch.cuda.Stream | None

    def _apply_lora_to_output(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        # The transformers backend adds a batch dimension; views keep the op in place.
        lora_apply(output.flatten(0, -2), x.flatten(0, -2), self.handle)
        return output

    def _apply_async_impl(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """In the host's op for two streams, VLLM_LORA_ENABLE_DUAL_STREAM: shrink beside the base product."""
        rows = x.flatten(0, -2)
        output, _ = maybe_execute_in_parallel(
            lambda: self._get_quant_method().apply(self.base_layer, x, bias),
            lambda: shrink(rows, self.handle),
            *self._events,
            self._lora_stream,
        )
        expand(output.flatten(0, -2), rows, self.handle)
        return cast(torch.Tensor, output)


class ArenaColumnParallelLinear(_ArenaLinear, ColumnParallelLinearWithLoRA):  # type: ignore[misc]
    """Column parallel, merged and qkv layers: they differ in slices only, and slices live in the arena."""

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if _has_own_forward(self.base_layer):
            return cast(torch.Tensor, self._apply_base_forward(x))
        return cast(torch.Tensor, super().apply(x, bias))


class ArenaRowParallelLinear(_ArenaLinear, RowParallelLinearWithLoRA):  # type: ignore[misc]
    """Row parallel: every rank adds its part of the delta before the reduction, A being cut by columns."""


class ArenaReplicatedLinear(_ArenaLinear, ReplicatedLinearWithLoRA):  # type: ignore[misc]
    """Replicated on every rank."""


class ArenaEmbedding(VocabParallelEmbeddingWithLoRA):  # type: ignore[misc]
    """Token embedding; the output is complete on every rank, so A and B are too."""

    handle: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base_layer.forward(x)
        lora_embed(output.flatten(0, -2), x.flatten(), self.handle)
        return output


class ArenaLogitsProcessor(LogitsProcessorWithLoRA):  # type: ignore[misc]
    """lm_head: the delta is added to the gathered logits of the sampled rows."""

    handle: int
    before_logits: Callable[[int], None]

    def _get_logits(
        self,
        hidden_states: torch.Tensor,
        lm_head: VocabParallelEmbedding,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        if skip_gather:
            raise NotImplementedError("an lm_head adapter needs the gathered logits")
        self.before_logits(hidden_states.shape[0])
        head = getattr(lm_head, "base_layer", lm_head)
        logits = self.base_layer._gather_logits(
            self.base_layer._apply_head(head, hidden_states, embedding_bias)
        )
        if logits is None:
            return None
        if self.token_order is not None:
            logits = logits[:, self.token_order]
        logits = logits[:, : self.base_layer.vocab_size]
        if logits.dtype == hidden_states.dtype:
            lora_apply(logits, hidden_states, self.handle)
        else:
            # A float32 head over half-precision hidden states: the delta is made in the adapters' dtype.
            delta = torch.zeros_like(logits, dtype=hidden_states.dtype)
            lora_apply(delta, hidden_states, self.handle)
            logits += delta
        return cast(torch.Tensor, logits)

    @property
    def token_order(self) -> torch.Tensor | None:
        """The column of each token when the shards' padding is interleaved, [vocab] int64."""
        return cast("torch.Tensor | None", self.sharded_to_full_mapping_gpu)


class ArenaClassifier(nn.Module):
    """A classifier's or reranker's head, which the host calls with a row for each request."""

    handle: int
    before_logits: Callable[[int], None]

    def __init__(self, base_layer: ReplicatedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before_logits(x.shape[0])
        labels: torch.Tensor = self.base_layer(x)
        # The host computes heads in float32; the delta is made in the adapters' dtype.
        delta = torch.zeros_like(labels, dtype=self._dtype)
        lora_apply(delta, x.to(self._dtype), self.handle)
        return labels + delta


def _has_own_forward(base: nn.Module) -> bool:
    """Whether a merged layer's subclass computes in a forward of its own, which must not be bypassed."""
    return (
        isinstance(base, MergedColumnParallelLinear)
        and type(base).forward is not MergedColumnParallelLinear.forward
        and base.tp_size == 1
    )


@dataclass(frozen=True)
class Wrapped:
    """A wrapped layer and the names under which adapters may target it.

    Attributes:
        layer: what an adapter can change of it.
        module: what stands in its place.
        base: the host's own layer; of an lm_head the head, not the logits processor.
    """

    layer: Layer
    module: BaseLayerWithLoRA
    base: nn.Module


def wrap_linear(name: str, base: LinearBase, packed: list[str]) -> Wrapped | None:
    """Wrap one linear layer.

    Args:
        name: its dotted path in the model.
        base: the host's layer.
        packed: leaf names of the target modules it packs, in output order; empty when it packs none.

    Returns:
        None when its kind of parallelism is not one that the wrappers know.
    """
    # The quantised base layers subclass these; an exact match would leave them out.
    with _weight_to_ask(base):
        return _wrap_linear(name, base, packed)


@contextmanager
def _weight_to_ask(base: LinearBase) -> Iterator[None]:
    """The host reads a layer's device off its weight, which a CPU's int8 kernel took away and packed."""
    taken = "weight" in base._parameters and base.weight is None
    if taken:
        base.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    try:
        yield
    finally:
        if taken:
            base.weight = None


def _wrap_linear(name: str, base: LinearBase, packed: list[str]) -> Wrapped | None:
    if isinstance(base, ColumnParallelLinear):
        module = ArenaColumnParallelLinear(base)
        outputs = _column_outputs(base)
        columns = (base.input_size, (0, base.input_size))
    elif isinstance(base, RowParallelLinear):
        module = ArenaRowParallelLinear(base)
        outputs = [(base.output_size, (0, base.output_size))]
        columns = (base.input_size, _shard(base.input_size, base.tp_rank, base.tp_size))
    elif isinstance(base, ReplicatedLinear):
        module = ArenaReplicatedLinear(base)
        outputs = [(base.output_size, (0, base.output_size))]
        columns = (base.input_size, (0, base.input_size))
    else:
        return None
    # The host's op for two streams reads its output's width off this.
    module.output_slices = tuple(stop - start for _, (start, stop) in outputs)
    names = _slice_names(name, packed, len(outputs))
    slices = tuple(
        Slice(slice_name, columns[0], size, columns[1], shard)
        for slice_name, (size, shard) in zip(names, outputs, strict=True)
    )
    cut = _OTHER_RANKS if columns[1] != (0, base.input_size) else ""
    return Wrapped(Layer(name, Kind.LINEAR, slices, cut), module, base)


def wrap_embedding(name: str, base: VocabParallelEmbedding) -> Wrapped | None:
    """Wrap a token embedding; None for a head, and for one that changes what it looks up (a scale)."""
    if isinstance(base, ParallelLMHead) or type(base).forward is not VocabParallelEmbedding.forward:
        return None
    vocab, width = base.org_vocab_size, base.embedding_dim
    entry = Slice(name, vocab, width, (0, vocab), (0, width))
    cut = _OTHER_RANKS if base.tp_size > 1 else ""
    return Wrapped(Layer(name, Kind.EMBEDDING, (entry,), cut), ArenaEmbedding(base), base)


def wrap_classifier(name: str, base: ReplicatedLinear, dtype: torch.dtype) -> Wrapped:
    """Wrap the head of a classifier or reranker: whoever calls it is to call the wrapper."""
    entry = Slice(name, base.input_size, base.output_size, (0, base.input_size), (0, base.output_size))
    layer = Layer(name, Kind.CLASSIFIER, (entry,))
    return Wrapped(layer, ArenaClassifier(base, dtype), base)


def wrap_lm_head(name: str, head: ParallelLMHead, logits_processor: nn.Module) -> Wrapped:
    """Wrap the logits processor that the lm_head is applied by."""
    module = ArenaLogitsProcessor(
        logits_processor,
        head.embedding_dim,
        head.weight.dtype,
        head.weight.device,
        head.get_sharded_to_full_mapping(),
    )
    order = module.sharded_to_full_mapping
    module.sharded_to_full_mapping_gpu = (
        None if order is None else torch.tensor(order, device=head.weight.device, dtype=torch.long)
    )
    vocab, width = int(module.base_layer.vocab_size), int(head.embedding_dim)
    entry = Slice(name, width, vocab, (0, width), (0, vocab))
    cut = _OTHER_RANKS if head.tp_size > 1 else ""
    if module.base_layer.head_dtype not in (None, head.weight.dtype):
        cut = "the logits are made in another dtype than the model's"
    return Wrapped(Layer(name, Kind.LM_HEAD, (entry,), cut), module, head)


def _column_outputs(base: ColumnParallelLinear) -> list[tuple[int, tuple[int, int]]]:
    """Per slice: its full output size, and the part that this rank holds."""
    if isinstance(base, QKVParallelLinear):
        kv_rank = base.tp_rank // base.num_kv_head_replicas
        heads = [
            (base.total_num_heads, base.num_heads, base.head_size, base.tp_rank),
            (base.total_num_kv_heads, base.num_kv_heads, base.head_size, kv_rank),
            (base.total_num_kv_heads, base.num_kv_heads, base.v_head_size, kv_rank),
        ]
        return [
            (total * size, (rank * local * size, (rank + 1) * local * size))
            for total, local, size, rank in heads
        ]
    sizes = base.output_sizes if isinstance(base, MergedColumnParallelLinear) else [base.output_size]
    return [(size, _shard(size, base.tp_rank, base.tp_size)) for size in sizes]


def _shard(size: int, rank: int, ranks: int) -> tuple[int, int]:
    part = size // ranks
    return rank * part, (rank + 1) * part


def _slice_names(name: str, packed: list[str], count: int) -> list[str]:
    if count == 1:
        return [name]
    parent, dot, leaf = name.rpartition(".")
    # Phi's qkv_proj packs nothing that the host knows by name, but adapters may be trained on its parts.
    parts = packed if len(packed) == count else PACKED.get(leaf, ())
    if len(parts) == count:
        return [f"{parent}{dot}{part}" for part in parts]
    return [f"{name}[{index}]" for index in range(count)]
