"""`adapter_config.json`: what of PEFT's LoraConfig is needed to serve an adapter, and what cannot be served.

The tensors say what is targeted, so `target_modules`, `exclude_modules`, `layers_to_transform` and
`layers_pattern` are not read, nor are `fan_in_fan_out` and `lora_dropout`. Unknown keys are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from lora_plugin.adapter.document import parse_object, show
from lora_plugin.adapter.patterns import Patterns
from lora_plugin.errors import AdapterRejected, Code

T = TypeVar("T")

CONFIG_FILE: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 1 << 20
_MAX_BASE_MODEL: Final = 500
_MAX_RANK: Final = 1 << 20
_MAX_TOKEN: Final = 1 << 31

_UNSUPPORTED: Final[dict[str, str]] = {
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "layer_replication": "layer replication",
    "target_parameters": "target_parameters (LoRA on bare parameters, such as fused experts)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA (BD-LoRA)",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron layers",
}
"""Fields that change what is computed; any value but null, false, 0 and an empty one switches them on."""

_HARMLESS_INITS: Final = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Initialisations that leave the base alone when PEFT loads the adapter; PiSSA and LoftQ, say, change it."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The checked config of one adapter.

    Attributes:
        r: the rank where no pattern says otherwise.
        alpha: `lora_alpha` where no pattern says otherwise.
        use_rslora: whether the scale is alpha / sqrt(r), https://arxiv.org/abs/2312.03732.
        rank_pattern: ranks by module.
        alpha_pattern: alphas by module.
        dora: whether every module has a magnitude of its outputs, https://arxiv.org/abs/2402.09353.
        bias: whether biases of the base model were trained and saved.
        lora_bias: whether every lora_B has a bias.
        tokens: trained tokens by the end of their module's name; "" is the embedding, whatever its name.
        saved_modules: `modules_to_save`, the ends of names of modules whose weights are saved whole.
        base_model: `base_model_name_or_path`, if the config names one: at most 500 printable characters.
        canonical: the config's content, the same for every order of its keys and every white space.
    """

    r: int
    alpha: float
    use_rslora: bool
    rank_pattern: Patterns[int]
    alpha_pattern: Patterns[float]
    dora: bool
    bias: bool
    lora_bias: bool
    tokens: Mapping[str, tuple[int, ...]]
    saved_modules: tuple[str, ...]
    base_model: str | None
    canonical: bytes

    @classmethod
    def from_bytes(cls, raw: bytes) -> AdapterConfig:
        """Read the file's content.

        Raises:
            AdapterRejected: TOO_LARGE, CONFIG_INVALID, PEFT_TYPE_UNSUPPORTED, FEATURE_UNSUPPORTED,
                RANK_INVALID or ALPHA_INVALID.
            AdapterIncomplete: INCOMPLETE, for a file that ends in the middle.
        """
        if len(raw) > MAX_CONFIG_BYTES:
            raise AdapterRejected(
                Code.TOO_LARGE,
                f"{CONFIG_FILE} is too large",
                expected=f"at most {MAX_CONFIG_BYTES} bytes",
                found=f"{len(raw)} bytes",
            )
        data = parse_object(raw, CONFIG_FILE, Code.CONFIG_INVALID, growing=True)
        _check_type(data)
        _check_features(data)
        return cls(
            r=_rank("r", data.get("r")),
            alpha=_alpha("lora_alpha", data.get("lora_alpha")),
            use_rslora=_flag("use_rslora", data.get("use_rslora")),
            rank_pattern=_patterns(data, "rank_pattern", _rank),
            alpha_pattern=_patterns(data, "alpha_pattern", _alpha),
            dora=_flag("use_dora", data.get("use_dora")),
            bias=_trains_biases(data.get("bias")),
            lora_bias=_flag("lora_bias", data.get("lora_bias")),
            tokens=_tokens(data.get("trainable_token_indices")),
            saved_modules=_saved_modules(data.get("modules_to_save")),
            base_model=_base_model(data.get("base_model_name_or_path")),
            canonical=_canonical(data),
        )

    def rank(self, module: str) -> int:
        """The rank of a module, by its name in the model that was trained ("model.layers.0.mlp.up_proj")."""
        return self.rank_pattern.get(module, self.r)

    def scale(self, module: str) -> float:
        """The factor of B A for a module, as PEFT's LoraLayer.update_layer computes it."""
        rank = self.rank(module)
        alpha = self.alpha_pattern.get(module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _check_type(data: dict[str, Any]) -> None:
    kind = data.get("peft_type")
    if kind != "LORA":
        raise AdapterRejected(
            Code.PEFT_TYPE_UNSUPPORTED,
            "peft_type is not served",
            expected="LORA",
            found=show(kind) if kind is not None else "none",
            hint="make a LoRA of it with PEFT's save_as_lora where that knows the type, or merge it",
        )


def _check_features(data: dict[str, Any]) -> None:
    for field, feature in _UNSUPPORTED.items():
        if data.get(field):
            raise _unsupported(field, feature, data[field], "train or merge without it")
    if data.get("use_dora") and data.get("lora_bias"):
        raise _unsupported(
            "lora_bias", "a bias of lora_B together with DoRA", True, "PEFT trains no such thing"
        )
    init = data.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _HARMLESS_INITS:
        raise _unsupported(
            "init_lora_weights",
            "an adapter relative to a changed base",
            init,
            "save it with path_initial_model_for_weight_conversion, or run lora-plugin convert --initial: "
            "both make a plain LoRA of it, given the adapter as it was initialised",
        )


def _unsupported(field: str, feature: str, value: object, hint: str) -> AdapterRejected:
    return AdapterRejected(
        Code.FEATURE_UNSUPPORTED, f"{field}: {feature} is not supported", found=show(value), hint=hint
    )


def _base_model(value: object) -> str | None:
    """A stranger's words, shown in lists with those of others: short, and text that JSON can carry."""
    if not isinstance(value, str) or not value:
        return None
    return "".join(char if char.isprintable() else "?" for char in value[:_MAX_BASE_MODEL])


def _rank(field: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_RANK:
        return value
    raise AdapterRejected(
        Code.RANK_INVALID, f"{field} is not a rank", expected="a positive integer", found=_found(value)
    )


def _alpha(field: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30:
        return float(value)
    raise AdapterRejected(
        Code.ALPHA_INVALID,
        f"{field} is not a scale",
        expected="a positive, finite number",
        found=_found(value),
    )


def _flag(field: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise AdapterRejected(
        Code.CONFIG_INVALID, f"{field} is not a flag", expected="true or false", found=show(value)
    )


def _trains_biases(value: object) -> bool:
    if value in (None, "none", "all", "lora_only"):
        return value not in (None, "none")
    raise AdapterRejected(
        Code.CONFIG_INVALID, "bias is unknown", expected="none, all or lora_only", found=show(value)
    )


def _tokens(value: object) -> dict[str, tuple[int, ...]]:
    by_module = value if isinstance(value, dict) else {"": value} if value else {}
    return {name: _token_list(tokens) for name, tokens in by_module.items()}


def _token_list(value: object) -> tuple[int, ...]:
    tokens = value if isinstance(value, list) else []
    whole = all(type(token) is int and 0 <= token < _MAX_TOKEN for token in tokens)
    if whole and tokens and len(set(tokens)) == len(tokens):
        return tuple(tokens)
    raise AdapterRejected(
        Code.CONFIG_INVALID,
        "trainable_token_indices are not tokens",
        expected="a list of different token ids, or one for each module",
        found=show(value),
    )


def _saved_modules(value: object) -> tuple[str, ...]:
    names = value or []
    if isinstance(names, list) and all(isinstance(name, str) and name for name in names):
        return tuple(names)
    raise AdapterRejected(
        Code.CONFIG_INVALID,
        "modules_to_save is not a list of names",
        expected="[name, ...]",
        found=show(value),
    )


def _patterns(data: dict[str, Any], field: str, check: Callable[[str, object], T]) -> Patterns[T]:
    values = data.get(field)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise AdapterRejected(
            Code.CONFIG_INVALID, f"{field} is not an object", expected="{pattern: value}", found=show(values)
        )
    return Patterns.compile(field, {key: check(f"{field}[{show(key)}]", v) for key, v in values.items()})


def _found(value: object) -> str:
    return "none" if value is None else show(value)


def _canonical(data: dict[str, Any]) -> bytes:
    # Only the top level is sorted: the order of patterns decides which of them applies.
    try:
        return json.dumps(dict(sorted(data.items())), separators=(",", ":")).encode()
    except RecursionError:
        raise AdapterRejected(Code.CONFIG_INVALID, f"{CONFIG_FILE} is nested too deeply") from None
