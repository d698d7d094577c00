"""Where the tensors of an adapter go: what the header check finds out and the packer carries out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lora_plugin.adapter.checkpoint import TensorInfo


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
class LayerPlan:
    """A targeted layer.

    Attributes:
        layer: index in `ModelLayout.layers`.
        rank: the highest rank of its slices.
        slices: one entry for each slice of the layer, None for one without a target.
    """

    layer: int
    rank: int
    slices: tuple[SlicePlan | None, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How an adapter is packed.

    Attributes:
        rank: the highest rank of any layer.
        targets: the last parts of the targeted modules' names, sorted.
        layers: the targeted layers in the layout's order.
        nbytes: bytes of the packed adapter on this rank.
        warnings: what a person may want to know though it is served.
    """

    rank: int
    targets: tuple[str, ...]
    layers: tuple[LayerPlan, ...]
    nbytes: int
    warnings: tuple[str, ...]


def scaled(plan: Plan, factor: float) -> Plan:
    """The plan of an adapter that adds `factor` times as much."""
    if factor == 1:
        return plan
    layers = tuple(
        replace(
            layer,
            slices=tuple(part and replace(part, scale=part.scale * factor) for part in layer.slices),
        )
        for layer in plan.layers
    )
    return replace(plan, layers=layers)
