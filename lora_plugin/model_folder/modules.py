"""The modules of a checkpoint, from nothing but the names and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from lora_plugin.layout import HEADS, Kind
from lora_plugin.model_folder.locate import ModelUnreadable

EMBEDDINGS: Final = frozenset({"embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings"})
_POSITIONS: Final = frozenset({"wpe", "embed_positions", "position_embeddings", "token_type_embeddings"})
_UNREADABLE: Final = frozenset({"bitsandbytes"})
"""Quantisations that store weights without their shape."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer, lm_head or token embedding (where `inputs` is the vocabulary)."""

    name: str
    kind: Kind
    inputs: int
    outputs: int


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in the safetensors files of a model's folder; no weight is read.

    Raises:
        ModelUnreadable: there are none, or one cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        # `consolidated` repeats the same weights under other names.
        if path.name.startswith(("consolidated", "adapter_model")):
            continue
        try:
            with safe_open(path, "numpy") as file:
                shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelUnreadable(f"{path.name} of the model cannot be read: {error}") from None
    if not shapes:
        raise ModelUnreadable("the model's folder holds no safetensors weights")
    return shapes


def modules(shapes: Shapes, config: Mapping[str, Any]) -> Iterator[Module]:
    """Every module with a two-dimensional weight, plain or quantised, in the checkpoint's order.

    Raises:
        ModelUnreadable: the kind of quantisation keeps no shapes.
    """
    quantisation = config.get("quantization_config") or {}
    if quantisation.get("quant_method") in _UNREADABLE:
        raise ModelUnreadable(
            f"{quantisation['quant_method']} weights do not say their shapes: name the model without them"
        )
    classifies = str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification")
    for key, shape in shapes.items():
        name, _, stored = key.rpartition(".")
        leaf = name.rpartition(".")[2]
        if len(shape) != 2 or leaf in _POSITIONS:
            continue
        sizes = _sizes(stored, shape, quantisation)
        if sizes is None:
            continue
        outputs, inputs = sizes
        if leaf in HEADS and classifies:
            yield Module(name, Kind.CLASSIFIER, inputs, outputs)
        elif leaf in EMBEDDINGS:
            yield Module(name, Kind.EMBEDDING, outputs, inputs)
        else:
            yield Module(name, Kind.LM_HEAD if leaf == "lm_head" else Kind.LINEAR, inputs, outputs)


def _sizes(stored: str, shape: tuple[int, ...], quantisation: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the weight [out, in] behind a stored tensor; None for one that is no weight."""
    first, second = shape
    match stored:
        case "weight":
            return first, second
        case "weight_packed":
            return first, second * 32 // _bits(quantisation)
        case "qweight" if quantisation.get("quant_method") == "awq":
            return second * 32 // _bits(quantisation), first
        case "qweight":
            return second, first * 32 // _bits(quantisation)
        case _:
            return None


def _bits(quantisation: Mapping[str, Any]) -> int:
    groups = quantisation.get("config_groups") or {}
    found = [quantisation.get("bits"), *(group["weights"]["num_bits"] for group in groups.values())]
    return next((int(bits) for bits in found if bits), 4)
