"""Where the tensors of an adapter go: what the header check finds out and the packer carries out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lora_plugin.adapter.checkpoint import TensorInfo
from lora_plugin.layout import AFFINE_ROWS


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The tensors of one slice.

    Attributes:
        a: [rank, in_features].
        b: [rows, rank]; the slice's part are the rows [b_rows[0], b_rows[1]).
        b_rows: all of B, or the slice's part of one trained on the packed layer.
        rank: the rank of this module.
        scale: the factor of B A.
    """

    a: TensorInfo
    b: TensorInfo
    b_rows: tuple[int, int]
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What else changes the outputs of a slice: y becomes (y + x A^T B) (1 + gain) + shift.

    Attributes:
        rows: the slice's part [start, stop) of the vectors.
        scale: the factor of B A and of lora_bias.
        magnitude: DoRA's, [rows]; the gain is that over the norm of the changed weight's rows, less 1.
        bias: what the base layer's bias became, [rows].
        lora_bias: the bias of lora_B, [rows].
    """

    rows: tuple[int, int]
    scale: float
    magnitude: TensorInfo | None = None
    bias: TensorInfo | None = None
    lora_bias: TensorInfo | None = None

    @property
    def vectors(self) -> tuple[TensorInfo, ...]:
        return tuple(v for v in (self.magnitude, self.bias, self.lora_bias) if v is not None)


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """Trained rows of an embedding or an lm_head.

    Attributes:
        values: [tokens, width], what the rows became.
        tokens: which tokens they are.
        scale: the factor of the difference to the base model's rows.
    """

    values: TensorInfo
    tokens: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A parameter that was saved whole (`modules_to_save`), to be compared with the base model's.

    Attributes:
        values: all of it; of an embedding or an lm_head [vocabulary, width], of a classifier [labels, width].
        parameter: its name in the trained model.
        layer: index in `ModelLayout.layers` of the embedding or head whose changed rows are served; None
            for a parameter that must be the base model's.
        scale: the factor of the difference to the base model's rows.
    """

    values: TensorInfo
    parameter: str
    layer: int | None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A targeted layer.

    Attributes:
        layer: index in `ModelLayout.layers`.
        rank: the highest rank of its slices; 0 where only a bias was trained.
        slices: one entry for each slice of the layer, None for one without a target.
        tokens: trained tokens; each takes a rank row, and no slice has a target.
        outputs: one entry for each slice, None for one whose outputs are neither scaled nor shifted; empty
            when none is.
    """

    layer: int
    rank: int
    slices: tuple[SlicePlan | None, ...]
    outputs: tuple[OutputPlan | None, ...] = ()
    tokens: TokenPlan | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How an adapter is packed.

    Attributes:
        rank: the highest rank of any layer.
        targets: the last parts of the targeted modules' names, sorted.
        layers: the targeted layers in the layout's order.
        nbytes: bytes of the packed adapter on this rank.
        warnings: what a person may want to know though it is served.
        saved: what is known only once it is compared with the base model: neither `rank` nor `nbytes` has it.
    """

    rank: int
    targets: tuple[str, ...]
    layers: tuple[LayerPlan, ...]
    nbytes: int
    warnings: tuple[str, ...]
    saved: tuple[SavedPlan, ...] = ()

    @property
    def affine(self) -> bool:
        """Whether it scales or shifts outputs (DoRA, biases)."""
        return any(layer.outputs for layer in self.layers)

    @property
    def relative(self) -> bool:
        """Whether it is made of the base model's weights, too (DoRA, biases, tokens, saved modules)."""
        return self.affine or bool(self.saved) or any(layer.tokens for layer in self.layers)

    @property
    def rows(self) -> int:
        """Arena rows in every layer."""
        return self.rank + AFFINE_ROWS * self.affine


def scaled(plan: Plan, factor: float) -> Plan:
    """The plan of an adapter that adds `factor` times as much."""
    if factor == 1:
        return plan
    layers = tuple(
        replace(
            layer,
            slices=tuple(part and replace(part, scale=part.scale * factor) for part in layer.slices),
            tokens=layer.tokens and replace(layer.tokens, scale=layer.tokens.scale * factor),
        )
        for layer in plan.layers
    )
    saved = tuple(replace(each, scale=each.scale * factor) for each in plan.saved)
    return replace(plan, layers=layers, saved=saved)
