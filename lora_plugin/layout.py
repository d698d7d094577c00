"""What of a model an adapter can change, as plain data: made once by the host, used everywhere else.

A host wraps linear, embedding and lm_head layers. Each wrapped layer has one or more output slices
(qkv_proj has three); an adapter's target module names one slice, or the whole layer when it was trained on
the packed one. Sizes are those of the whole model; shards say which part this rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

EXPERTS: Final = "MoE expert layers take no adapter yet; the attention layers do"
TOWERS: Final = "only the language model of a multimodal model takes an adapter"
POOLERS: Final = "the layers of a pooler take no adapter, but for a classifier's head"
"""Why a module is in `ModelLayout.unwrapped`."""

HEADS: Final = frozenset({"score", "classifier"})
"""What a classifier's head is called, in PEFT and in the host."""

PACKED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The usual names of a packed layer's parts, for models that have no modules of these names."""

MAX_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What the host takes as `--max-lora-rank`."""
DEFAULT_MAX_RANK: Final = 64
"""`--max-lora-rank` where it is not given."""

AFFINE_ROWS: Final = 2
"""Rows beside those of its rank that an adapter with DoRA or trained biases takes: of gains and of shifts."""


def max_rank_hint(rows: int, otherwise: str = "merge the adapter into the base model") -> str:
    """What to do about an adapter that needs so many rows, more than there are.

    Args:
        rows: at least 2.
        otherwise: what is left where no server has so many.
    """
    fitting = next((rank for rank in MAX_RANKS if rank >= rows), None)
    return otherwise if fitting is None else f"start the server with --max-lora-rank {fitting}"


class Kind(StrEnum):
    """How a layer applies its adapter."""

    LINEAR = "linear"
    """y[T, out] += (x[T, in] A^T) B"""
    EMBEDDING = "embedding"
    """y[T, out] += A[:, token]^T B; `in` is the vocabulary"""
    LM_HEAD = "lm_head"
    """as linear, over the sampled rows; `out` is the vocabulary"""
    CLASSIFIER = "classifier"
    """as linear, over a row for each request that is classified; `out` is the labels"""


@dataclass(frozen=True, slots=True)
class Slice:
    """One output slice of a layer: one target module of an adapter.

    Attributes:
        name: the module's dotted path in the host's model, "model.layers.0.self_attn.q_proj".
        in_features: columns of A (the vocabulary for an embedding), unsharded.
        out_features: rows of PEFT's B, unsharded.
        in_shard: [start, stop) of the input columns this rank holds.
        out_shard: [start, stop) of the outputs this rank holds.
    """

    name: str
    in_features: int
    out_features: int
    in_shard: tuple[int, int]
    out_shard: tuple[int, int]

    @property
    def local_in(self) -> int:
        return self.in_shard[1] - self.in_shard[0]

    @property
    def local_out(self) -> int:
        return self.out_shard[1] - self.out_shard[0]


@dataclass(frozen=True, slots=True)
class Layer:
    """A wrapped layer; all its slices read the same input.

    Attributes:
        name: the layer's dotted path, "model.layers.0.self_attn.qkv_proj"; with one slice, its name.
        kind: how it applies its adapter.
        slices: in the order of the layer's output.
        tied: whether it is an lm_head whose weight is the embedding's.
        no_dora: why the norms that DoRA takes of its weight cannot be had on one rank; empty where they can.
    """

    name: str
    kind: Kind
    slices: tuple[Slice, ...]
    no_dora: str = ""
    tied: bool = False

    @property
    def local_in(self) -> int:
        return self.slices[0].local_in

    @property
    def row_elements(self) -> int:
        """Elements that one rank row takes here: A and B of every slice."""
        return sum(s.local_in + s.local_out for s in self.slices)


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Every layer that an adapter may target, in the model's order.

    Attributes:
        layers: the wrapped layers.
        dtype: the dtype adapters are served in, "bfloat16", "float16" or "float32".
        max_rank: the highest rank that fits (`--max-lora-rank`).
        unwrapped: paths of modules that exist but take no adapter, with the reason ("experts").
    """

    layers: tuple[Layer, ...]
    dtype: str
    max_rank: int
    unwrapped: Mapping[str, str]

    @property
    def row_elements(self) -> int:
        return sum(layer.row_elements for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain str, int, list and dict, for RPC."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelLayout:
        """The inverse of `to_dict`; lists where tuples were are fine."""
        layers = tuple(
            Layer(
                name=layer["name"],
                kind=Kind(layer["kind"]),
                slices=tuple(
                    Slice(
                        name=s["name"],
                        in_features=s["in_features"],
                        out_features=s["out_features"],
                        in_shard=(s["in_shard"][0], s["in_shard"][1]),
                        out_shard=(s["out_shard"][0], s["out_shard"][1]),
                    )
                    for s in layer["slices"]
                ),
                no_dora=layer["no_dora"],
                tied=layer["tied"],
            )
            for layer in data["layers"]
        )
        return cls(layers, data["dtype"], data["max_rank"], dict(data["unwrapped"]))
