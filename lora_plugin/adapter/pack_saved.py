"""Modules that were saved whole: rows that are not the base model's become those of trained tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from lora_plugin.adapter.base_model import BaseModel
from lora_plugin.adapter.checkpoint import TensorInfo
from lora_plugin.adapter.document import show
from lora_plugin.adapter.join import join
from lora_plugin.adapter.matching import packed_nbytes
from lora_plugin.adapter.pack import SERVED, STORED, PackedAdapter, Packer, check_finite, check_largest
from lora_plugin.adapter.pack_tokens import finish_tokens
from lora_plugin.adapter.plan import LayerPlan, Plan, SavedPlan, TokenPlan
from lora_plugin.adapter.targets import core_name
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import AFFINE_ROWS, ModelLayout, max_rank_hint

_BLOCK_BYTES: Final = 1 << 24
_TURN_ELEMENTS: Final = 1 << 20
"""What one turn on the thread of the steps reads of the base model."""
_OTHERWISE: Final = (
    "merge the adapter into the base model and serve that, or train the tokens that matter with "
    "trainable_token_indices"
)


@dataclass(slots=True)
class _Found:
    """What of one parameter is not the base model's; rows of a vector are its elements."""

    plan: SavedPlan
    seen: int = 0
    changed: int = 0
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)


class Comparison:
    """Looks at saved parameters block by block, as they are read: most of a large one is never kept.

    A number is the base model's if it is equal to it once either is rounded to the other's dtype.

    Args:
        plan: the adapter's.
        layout: the model.
        base: its weights; None compares nothing.
        modules: `modules_to_save`, the ends of names of modules.

    Raises:
        AdapterRejected: TENSOR_PAIR_MISSING, for a module of these names that was not saved: PEFT does not
            load such an adapter.
    """

    def __init__(
        self, plan: Plan, layout: ModelLayout, base: BaseModel | None, modules: tuple[str, ...] = ()
    ) -> None:
        self._layout, self._base = layout, base
        self._limit = layout.max_rank - AFFINE_ROWS * plan.affine
        self._found = {saved.values.name: _Found(saved) for saved in plan.saved if base is not None}
        if self._found and base is not None:
            _check_whole({core_name(saved.parameter) for saved in plan.saved}, base, modules)

    def wants(self, tensor: TensorInfo) -> bool:
        """Whether the tensor is one to be compared."""
        return tensor.name in self._found

    def block(self, tensor: TensorInfo) -> int:
        """How many bytes of a wanted tensor are to be read at a time: whole rows."""
        row = (tensor.stop - tensor.start) // max(1, tensor.shape[0])
        return max(1, _BLOCK_BYTES // max(1, row)) * row

    def add(self, tensor: TensorInfo, raw: memoryview) -> None:
        """Compare the next block of a tensor.

        Args:
            tensor: one that is wanted.
            raw: its bytes.

        Raises:
            AdapterRejected: FEATURE_UNSUPPORTED, for a weight of the base model that cannot be read.
        """
        found = self._found[tensor.name]
        block = torch.frombuffer(raw, dtype=STORED[tensor.dtype]).view(-1, *tensor.shape[1:])
        base = self._base_rows(found, tensor, len(block))
        served = block.to(SERVED[self._layout.dtype]).float()
        changed = (served != base) & (block != base.to(block.dtype))
        (rows,) = changed.flatten(1).any(1).nonzero(as_tuple=True) if block.dim() > 1 else changed.nonzero().T
        if found.plan.layer is not None and found.changed < self._limit:
            found.tokens += (rows + found.seen).tolist()
            found.rows.append(block[rows].float())
        found.changed += len(rows)
        found.seen += len(block)

    def joined(self, packed: PackedAdapter) -> PackedAdapter:
        """The adapter with the rows that were found, after all that is wanted was added.

        Raises:
            AdapterRejected: FEATURE_UNSUPPORTED, for a parameter that differs and has no rows that can be
                served; RANK_TOO_LARGE, for more rows than fit; NOT_FINITE.
        """
        for found in self._found.values():
            self._check(found)
        changed = {name: found for name, found in self._found.items() if found.changed}
        if not changed or self._base is None:
            return packed
        layers = tuple(_layer_plan(found) for found in changed.values())
        rank = max(layer.rank for layer in layers)
        plan = Plan(rank, (), layers, packed_nbytes(layers, self._layout), ())
        rows = Packer(plan, self._layout).adapter
        vectors = {name: _values(found) for name, found in changed.items()}
        finish_tokens(rows, plan, vectors, self._layout, self._base)
        return join([packed, rows])

    def _base_rows(self, found: _Found, tensor: TensorInfo, count: int) -> Tensor:
        """The base model's numbers of the block that comes next, float32."""
        assert self._base is not None
        layer = found.plan.layer
        if layer is None:
            (whole,) = self._base.run([self._base.parameter(found.plan.parameter)])
            if whole.shape != tensor.shape:
                raise _differs(
                    found.plan, f"shape {list(tensor.shape)}, the base model's is {list(whole.shape)}"
                )
            return whole[found.seen : found.seen + count]
        tokens = torch.arange(found.seen, found.seen + count)
        parts = torch.split(tokens, max(1, _TURN_ELEMENTS // tensor.shape[1]))
        return torch.cat(self._base.run([self._base.layers[layer].rows(part) for part in parts]))

    def _check(self, found: _Found) -> None:
        if found.changed and found.plan.layer is None:
            raise _differs(found.plan, f"{found.changed} of {found.seen} rows differ")
        if found.changed > self._limit:
            beside = self._layout.max_rank - self._limit
            raise AdapterRejected(
                Code.RANK_TOO_LARGE,
                f"modules_to_save: more rows of {show(found.plan.parameter)} differ from the base model's "
                "than the server has room for: each takes a row of the pool",
                expected=f"at most {self._limit} rows that differ",
                found=f"{found.changed} of {found.seen} rows differ",
                hint=max_rank_hint(found.changed + beside, _OTHERWISE),
            )


def _check_whole(saved: set[str], base: BaseModel, modules: tuple[str, ...]) -> None:
    for name in base.parameters:
        # As PEFT matches them: "norm" is the end of "input_layernorm", too.
        if name.rpartition(".")[0].endswith(modules) and core_name(name) not in saved:
            raise AdapterRejected(
                Code.TENSOR_PAIR_MISSING,
                f"modules_to_save names {show(name)}, but it is not saved",
                hint="save the whole adapter again",
            )


def _layer_plan(found: _Found) -> LayerPlan:
    assert found.plan.layer is not None
    tokens = TokenPlan(found.plan.values, tuple(found.tokens), found.plan.scale)
    return LayerPlan(found.plan.layer, len(tokens.tokens), (None,), (), tokens)


def _values(found: _Found) -> Tensor:
    """The rows that differ, float32 [rows, width]."""
    values, saved = torch.cat(found.rows), found.plan
    check_largest(saved.values, check_finite(saved.values, values, values) * abs(saved.scale), "values")
    return values


def _differs(plan: SavedPlan, found: str) -> AdapterRejected:
    return AdapterRejected(
        Code.FEATURE_UNSUPPORTED,
        f"modules_to_save: {show(plan.parameter)} is not the base model's, and only rows of an embedding or "
        "a head can be served",
        found=found,
        hint="merge the adapter into the base model, or train it without this module in modules_to_save",
    )
