"""Trained tokens as rank rows: one picks the token, the other holds what its row differs by from the base."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_plugin.adapter.base_model import BaseModel
from lora_plugin.adapter.pack import PackedAdapter, PackedLayer, check_finite
from lora_plugin.adapter.plan import Plan, TokenPlan
from lora_plugin.layout import Kind, ModelLayout


def finish_tokens(
    packed: PackedAdapter, plan: Plan, vectors: dict[str, Tensor], layout: ModelLayout, base: BaseModel
) -> None:
    """Fill the layers of a packed adapter that stand for tokens.

    Args:
        packed: the adapter.
        plan: what it was packed by.
        vectors: the tokens' rows by name, float32 [tokens, width].
        layout: the model.
        base: its weights.

    Raises:
        AdapterRejected: NOT_FINITE, or FEATURE_UNSUPPORTED for a weight whose rows cannot be read.
    """
    pairs = [(t.tokens, layer) for t, layer in zip(plan.layers, packed.layers, strict=True) if t.tokens]
    tasks = [base.layers[layer.layer].rows(torch.tensor(tokens.tokens)) for tokens, layer in pairs]
    for (tokens, layer), rows in zip(pairs, base.run(tasks) if tasks else (), strict=True):
        difference = (vectors[tokens.values.name] - rows) * tokens.scale
        _fill(tokens, layer, difference, layout.layers[layer.layer].kind)


def _fill(tokens: TokenPlan, packed: PackedLayer, difference: Tensor, kind: Kind) -> None:
    picking, holding = packed.a[:, 0], packed.b[0]
    if kind is not Kind.EMBEDDING:
        picking, holding = holding, picking
    picking[torch.arange(len(tokens.tokens)), list(tokens.tokens)] = 1
    holding.copy_(difference)
    check_finite(tokens.values, difference, holding)
