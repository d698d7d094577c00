"""Wrapping a loaded model: every layer that an adapter may target, and the layout that describes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.utils import get_supported_lora_modules, is_in_target_modules, replace_submodule
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.linear import LinearBase, ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.pooler import Pooler
from vllm.model_executor.layers.pooler.seqwise.heads import ClassifierPoolerHead
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models import supports_multimodal
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.model_executor.utils import get_packed_modules_mapping

from lora_plugin.hosts.vllm.layers import (
    ArenaEmbedding,
    Wrapped,
    wrap_classifier,
    wrap_embedding,
    wrap_linear,
    wrap_lm_head,
)
from lora_plugin.layout import EXPERTS, HEADS, POOLERS, TOWERS, Kind, Layer, ModelLayout


class ModelWrapper:
    """Replaces a model's layers by wrapped ones.

    Args:
        model: the host's model, loaded.
        target_modules: the operator's `--lora-target-modules`, or None for all.
        dtype: the name of the serving dtype.
        max_rank: the highest rank that the arena is made for.
        classifies: whether the model is served as a classifier or reranker of whole texts.
    """

    def __init__(
        self,
        model: nn.Module,
        target_modules: list[str] | None,
        dtype: str,
        max_rank: int,
        *,
        classifies: bool = False,
    ) -> None:
        self.model = model
        self.wrapped: list[Wrapped] = []
        self._target_modules = target_modules
        self._dtype = dtype
        self._max_rank = max_rank
        self._packed = get_packed_modules_mapping(model)
        self._supported = set(get_supported_lora_modules(model))
        self._language_prefix = _language_prefix(model)
        self._pooled = _pooled_layers(model)
        self._heads = _classifier_heads(model) if classifies else {}
        self._unwrapped: dict[str, str] = {}
        self._wrapper_by_module: dict[int, BaseLayerWithLoRA] = {}

    def wrap(self) -> ModelLayout:
        """Wrap everything that can be, in the model's order."""
        for name, module in list(self.model.named_modules(remove_duplicate=False)):
            self._visit(name, module)
        for name, module in list(self.model.named_modules()):
            if isinstance(module, LogitsProcessor):
                self._wrap_tied_head(name, module)
        layers = tuple(self._noting_ties(wrapped) for wrapped in self.wrapped)
        return ModelLayout(layers, self._dtype, self._max_rank, self._unwrapped)

    def _noting_ties(self, wrapped: Wrapped) -> Layer:
        """The layer; of an lm_head it says whether the weight is an embedding's."""
        if wrapped.layer.kind is not Kind.LM_HEAD:
            return wrapped.layer
        embeddings = [each.base for each in self.wrapped if each.layer.kind is Kind.EMBEDDING]
        addresses = {_address(embedding) for embedding in embeddings}
        return replace(wrapped.layer, tied=_address(wrapped.base) in addresses - {None})

    def _visit(self, name: str, module: nn.Module) -> None:
        leaf = name.rpartition(".")[2]
        known = self._wrapper_by_module.get(id(module))
        if known is not None and leaf != "lm_head":
            # A module held under two paths, of whatever names: both must call the one wrapper.
            replace_submodule(self.model, name, known)
            return
        # The host lists the embeddings of some models only; the arena needs nothing of the others.
        if leaf not in self._supported and not isinstance(module, VocabParallelEmbedding):
            return
        if isinstance(module, MoERunner):
            self._unwrapped[name] = EXPERTS
            return
        if id(module) in self._pooled:
            self._wrap_head(name, module)
            return
        if isinstance(module, PPMissingLayer) or not isinstance(module, LinearBase | VocabParallelEmbedding):
            return
        if leaf != "lm_head" and not name.startswith(self._language_prefix):
            self._unwrapped[name] = TOWERS
            return
        if not is_in_target_modules(name, self._target_modules, self._packed):
            self._unwrapped[name] = "left out by --lora-target-modules"
            return
        if leaf == "lm_head":
            self._wrap_lm_head(name, module)
            return
        self._wrap(name, leaf, module)

    def _wrap(self, name: str, leaf: str, module: nn.Module) -> None:
        if isinstance(module, VocabParallelEmbedding):
            wrapped: Wrapped | None = wrap_embedding(name, module)
        else:
            wrapped = wrap_linear(name, module, self._packed.get(leaf, []))
        if wrapped is None:
            self._unwrapped[name] = f"{type(module).__name__} takes no adapter"
            return
        self._wrapper_by_module[id(module)] = wrapped.module
        self.wrapped.append(wrapped)
        replace_submodule(self.model, name, wrapped.module)

    def _wrap_head(self, name: str, module: nn.Module) -> None:
        # Layers that see a row for each request, or in any other number than a step's tokens.
        head = self._heads.get(id(module))
        plain = type(module) is ReplicatedLinear and name.rpartition(".")[2] in HEADS
        if head is None or not plain or not is_in_target_modules(name, self._target_modules, self._packed):
            self._unwrapped[name] = POOLERS
            return
        wrapped = wrap_classifier(name, cast(ReplicatedLinear, module), getattr(torch, self._dtype))
        self.wrapped.append(wrapped)
        head.classifier = wrapped.module

    def _wrap_lm_head(self, name: str, head: nn.Module) -> None:
        # The head stays; its product is made by the logits processor, which is wrapped in its stead.
        parent = name.rpartition(".")[0]
        processor_name = f"{parent}.logits_processor" if parent else "logits_processor"
        processors = dict(self.model.named_modules())
        if not isinstance(head, VocabParallelEmbedding) or processor_name not in processors:
            self._unwrapped[name] = f"{type(head).__name__} takes no adapter"
            return
        self._wrap_logits(name, head, processors[processor_name], processor_name)

    def _wrap_tied_head(self, processor_name: str, processor: nn.Module) -> None:
        """Of a model without a head (Gemma): its token embedding is one, which adapters call lm_head."""
        parent, dot, _ = processor_name.rpartition(".")
        name = f"{parent}{dot}lm_head"
        found = [m for n, m in self.model.named_modules() if n.startswith(f"{parent}{dot}")]
        embeddings = [m for m in found if isinstance(m, ArenaEmbedding)]
        headless = not any(isinstance(m, ParallelLMHead) for m in found) and len(embeddings) == 1
        if headless and is_in_target_modules(name, self._target_modules, self._packed):
            self._wrap_logits(name, embeddings[0].base_layer, processor, processor_name)

    def _wrap_logits(self, name: str, head: nn.Module, processor: nn.Module, processor_name: str) -> None:
        wrapped = wrap_lm_head(name, head, processor)
        self.wrapped.append(wrapped)
        replace_submodule(self.model, processor_name, wrapped.module)


def _poolers(model: nn.Module) -> Iterator[nn.Module]:
    """Every pooler; those by task are in a plain dict, where torch does not find them."""
    for module in model.modules():
        if isinstance(module, Pooler):
            yield from (module, *getattr(module, "poolers_by_task", {}).values())


def _pooled_layers(model: nn.Module) -> set[int]:
    """The ids of all layers that poolers call."""
    return {id(module) for pooler in _poolers(model) for module in pooler.modules()}


def _classifier_heads(model: nn.Module) -> dict[int, Any]:
    """The pooler's heads of whole texts, by the id of the layer that they call."""
    parts = (module for pooler in _poolers(model) for module in pooler.modules())
    return {id(part.classifier): part for part in parts if isinstance(part, ClassifierPoolerHead)}


def _address(module: nn.Module) -> int | None:
    weight = getattr(module, "weight", None)
    return weight.data_ptr() if isinstance(weight, torch.Tensor) else None


def _language_prefix(model: nn.Module) -> str:
    if not supports_multimodal(model) or not hasattr(model, "get_mm_mapping"):
        return ""
    mapping: Any = model.get_mm_mapping
    prefixes = mapping().language_model
    return str(prefixes[0]) if prefixes else ""


def unwrapped_summary(unwrapped: Mapping[str, str]) -> str:
    """The reasons with how many modules each concerns, for one log line."""
    reasons: dict[str, int] = {}
    for reason in unwrapped.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    return "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
