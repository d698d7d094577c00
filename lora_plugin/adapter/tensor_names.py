"""How PEFT and its relatives name the tensors of an adapter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

PEFT_PREFIX: Final = "base_model.model."

_LORA: Final = re.compile(
    r"(?P<module>.+)\."
    r"(?:lora_(?P<part>[AB])(?:\.(?P<adapter>[^.]+))?\.weight"
    r"|lora_embedding_(?P<embedding>[AB])(?:\.(?P<embedding_adapter>[^.]+))?)",
    re.DOTALL,
)

_VECTOR: Final = re.compile(
    r"(?P<module>.+?)\."
    r"(?:(?P<magnitude>lora_magnitude_vector)(?:\.[^.]+)?(?:\.weight)?"
    r"|(?P<lora_bias>lora_B)(?:\.[^.]+)?\.bias"
    r"|(?P<bias>(?:base_layer\.)?bias))",
    re.DOTALL,
)

_TOKENS: Final = re.compile(r"(.+?)\.token_adapter\.trainable_tokens_delta(?:\.[^.]+)?", re.DOTALL)
_WHOLE: Final = re.compile(
    r"(?P<module>(?:.+\.)?(?!lora_)[^.]+)\.(?:modules_to_save\.[^.]+\.)?(?P<leaf>weight|bias)", re.DOTALL
)
_WRAPPED: Final = re.compile(
    r"^(?:module|_orig_mod)\.|(?<=\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_ADAPTER: Final = re.compile(r"(?<=\.)(lora_[A-Za-z_]+)\.(?!(?:weight|bias)$)[^.]+(?=\.(?:weight|bias)$|$)")

_FEATURES: Final[tuple[tuple[str, str], ...]] = (
    (r"\.lora_diag\b", "KaSA"),
    (r"\.lora_monteclora", "MonteCLoRA"),
    (r"\.lora_arrow\b", "Arrow routing"),
)


@dataclass(frozen=True, slots=True)
class LoraName:
    """What the name of a lora_A or lora_B tensor says.

    Attributes:
        module: the module in the trained model, "model.layers.0.self_attn.q_proj".
        part: "A" or "B".
        embedding: whether it is a lora_embedding_A or lora_embedding_B.
        adapter: the adapter's name in the file, if it was saved with one.
    """

    module: str
    part: str
    embedding: bool
    adapter: str | None


def parse_lora(key: str) -> LoraName | None:
    """The parts of a lora_A, lora_B, lora_embedding_A or lora_embedding_B key, None for any other."""
    found = _LORA.fullmatch(key)
    if found is None:
        return None
    embedding = found["embedding"]
    return LoraName(
        module=found["module"].removeprefix(PEFT_PREFIX),
        part=embedding or found["part"],
        embedding=embedding is not None,
        adapter=found["embedding_adapter"] if embedding else found["adapter"],
    )


def parse_vector(key: str) -> tuple[str, str] | None:
    """The module and the kind of a vector over its outputs, None for any other key.

    Kinds: "magnitude" (DoRA), "lora_bias" (lora_B's bias) and "bias" (the base layer's, trained).
    """
    found = _VECTOR.fullmatch(key)
    if found is None or found.lastgroup is None:
        return None
    return found["module"].removeprefix(PEFT_PREFIX), found.lastgroup


def parse_tokens(key: str) -> str | None:
    """The module of a key under which PEFT saves the rows of trained tokens, None for any other key."""
    found = _TOKENS.fullmatch(key)
    return None if found is None else found[1].removeprefix(PEFT_PREFIX)


def parse_whole(key: str) -> str | None:
    """The parameter of the trained model that a key holds whole ("model.norm.weight"), None for any other."""
    found = _WHOLE.fullmatch(key)
    return None if found is None else f"{found['module'].removeprefix(PEFT_PREFIX)}.{found['leaf']}"


def peft_key(key: str) -> str:
    """The key as PEFT saves it: behind its prefix, without an adapter's name or a training's wrappers."""
    key = _WRAPPED.sub("", key)
    return PEFT_PREFIX + _ADAPTER.sub(r"\1", key).removeprefix(PEFT_PREFIX)


def parse_base_copy(key: str) -> str | None:
    """The module of a key under which PEFT saves the base weight of a targeted embedding, None for any other.

    See `save_embedding_layers` of `PeftModel.save_pretrained`.
    """
    module = key.removesuffix(".base_layer.weight")
    return None if module == key else module.removeprefix(PEFT_PREFIX)


def feature_of(key: str) -> str | None:
    """Which feature that is not plain LoRA a key belongs to, None if it says nothing."""
    return next((feature for pattern, feature in _FEATURES if re.search(pattern, key)), None)
