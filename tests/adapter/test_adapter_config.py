"""adapter_config.json: what is refused, under which code, and that PEFT's own rules decide rank and scale."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from lora_plugin.adapter import config as module
from lora_plugin.adapter.config import MAX_CONFIG_BYTES, AdapterConfig
from lora_plugin.errors import AdapterIncomplete, AdapterRejected, Code, LoraPluginError

GOOD: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}


def read(**changes: Any) -> AdapterConfig:
    data = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    return AdapterConfig.from_bytes(json.dumps(data).encode())


def code_of(raw: bytes) -> Code:
    with pytest.raises(LoraPluginError) as caught:
        AdapterConfig.from_bytes(raw)
    return caught.value.code


@pytest.mark.parametrize("r", [..., None, 0, -8, 8.0, "8", True, [8], 10**30])
def test_ranks_that_are_none(r: Any) -> None:
    with pytest.raises(AdapterRejected) as caught:
        read(r=r)
    assert caught.value.code is Code.RANK_INVALID


@pytest.mark.parametrize(
    "alpha", [..., None, 0, -16, 0.0, "16", True, float("nan"), float("inf"), float("-inf"), 10**400]
)
def test_alphas_that_are_none(alpha: Any) -> None:
    with pytest.raises(AdapterRejected) as caught:
        read(lora_alpha=alpha)
    assert caught.value.code is Code.ALPHA_INVALID


@pytest.mark.parametrize("kind", [..., None, "IA3", "ADALORA", "lora", 1, ["LORA"]])
def test_peft_types_that_are_not_lora(kind: Any) -> None:
    with pytest.raises(AdapterRejected) as caught:
        read(peft_type=kind)
    assert caught.value.code is Code.PEFT_TYPE_UNSUPPORTED
    assert kind in (..., None) or str(kind).strip("[]'") in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 2}),
        ("kasa_config", {"beta": 1e-4}),
        ("monteclora_config", {"num_samples": 8}),
        ("megatron_config", {"hidden_size": 8}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "CorDA"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "of_a_later_peft"),
    ],
)
def test_features_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(AdapterRejected, match=field) as caught:
        read(**{field: value})
    assert caught.value.code is Code.FEATURE_UNSUPPORTED


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica", "lora_ga"])
def test_initialisations_that_leave_the_base_alone(init: Any) -> None:
    assert read(init_lora_weights=init).r == 8


def test_a_bias_of_lora_b_with_dora_is_refused_as_by_peft() -> None:
    with pytest.raises(AdapterRejected, match="lora_bias") as caught:
        read(use_dora=True, lora_bias=True)
    assert caught.value.code is Code.FEATURE_UNSUPPORTED


@pytest.mark.parametrize("value", [[5, 5], [-1], [1.0], [True], "5", {"embed_tokens": 5}, {"lm_head": []}])
def test_tokens_that_are_none(value: Any) -> None:
    with pytest.raises(AdapterRejected, match="trainable_token_indices") as caught:
        read(trainable_token_indices=value)
    assert caught.value.code is Code.CONFIG_INVALID


@pytest.mark.parametrize("value", ["lm_head", [1], [""], {"lm_head": 1}, True])
def test_saved_modules_that_are_no_names(value: Any) -> None:
    with pytest.raises(AdapterRejected, match="modules_to_save") as caught:
        read(modules_to_save=value)
    assert caught.value.code is Code.CONFIG_INVALID


@pytest.mark.parametrize("field", ["use_dora", "lora_bias", "bias"])
def test_flags_of_another_kind(field: str) -> None:
    with pytest.raises(AdapterRejected, match=field) as caught:
        read(**{field: "some"})
    assert caught.value.code is Code.CONFIG_INVALID


def test_every_field_of_peft_was_decided_on() -> None:
    read_or_refused = set(module._UNSUPPORTED) | {
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "use_dora",
        "lora_bias",
        "trainable_token_indices",
        "modules_to_save",
        "init_lora_weights",
        "peft_type",
        "base_model_name_or_path",
    }
    of_no_effect = {
        # the tensors are the truth
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "ensure_weight_tying",
        # matter in training only
        "lora_dropout",
        "fan_in_fan_out",
        "velora_config",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "inference_mode",
        "task_type",
        "auto_mapping",
        "revision",
        "peft_version",
    }
    assert {field.name for field in fields(LoraConfig)} - read_or_refused - of_no_effect == set()


def test_unknown_keys_and_defaults_are_ignored() -> None:
    config = read(of_the_future={"x": [1]}, bias=None, use_dora=None, modules_to_save=[], rank_pattern=None)
    assert (config.rank("a"), config.scale("a"), config.base_model) == (8, 2.0, None)


@pytest.mark.parametrize("base", [None, "", 3, ["x"], ...])
def test_a_base_model_that_says_nothing(base: Any) -> None:
    assert read(base_model_name_or_path=base).base_model is None


def test_a_base_model_is_short_and_can_be_shown() -> None:
    """In the lists of all adapters: JSON cannot carry half a character, nor terminals an escape."""
    assert read(base_model_name_or_path="org/\ud800\x1b[2Jé").base_model == "org/??[2Jé"
    assert len(read(base_model_name_or_path="m" * 100_000).base_model or "") == 500


def test_rslora_divides_by_the_root_of_the_modules_own_rank() -> None:
    config = read(use_rslora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"k_proj": 1})
    assert [config.scale(name) for name in ("x.q_proj", "x.k_proj")] == [8.0, 1 / 8**0.5]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("use_rslora", "false", Code.CONFIG_INVALID),
        ("rank_pattern", ["q_proj"], Code.CONFIG_INVALID),
        ("rank_pattern", {"q_proj": 0}, Code.RANK_INVALID),
        ("alpha_pattern", {"q_proj": None}, Code.ALPHA_INVALID),
        ("alpha_pattern", {"q_(proj": 1}, Code.CONFIG_INVALID),
        ("rank_pattern", {"(a*)*b": 1}, Code.CONFIG_INVALID),
        ("rank_pattern", {"(a|a)*b": 1}, Code.CONFIG_INVALID),
        ("rank_pattern", {"(a|aa)" * 40: 1}, Code.CONFIG_INVALID),
        ("rank_pattern", {".?" * 60 + "x": 1}, Code.CONFIG_INVALID),
        ("rank_pattern", {"(.*.*)+x": 1}, Code.CONFIG_INVALID),
        ("rank_pattern", {".*" * 5 + "x": 1}, Code.CONFIG_INVALID),
        ("rank_pattern", {"a{99999999999999999999}": 1}, Code.CONFIG_INVALID),
        ("rank_pattern", {"a" * 600: 1}, Code.CONFIG_INVALID),
        ("rank_pattern", {f".*.*.*{i}": 1 for i in range(99)}, Code.CONFIG_INVALID),
    ],
)
def test_values_that_cannot_be_used(field: str, value: Any, code: Code) -> None:
    with pytest.raises(AdapterRejected) as caught:
        read(**{field: value})
    assert caught.value.code is code


NAMES = [f"model.layers.{i}.{path}" for i in (0, 1, 11) for path in ("self_attn.q_proj", "mlp.up_proj")]
KEYS = [
    "q_proj",
    "self_attn.q_proj",
    "proj",
    r"^model\.layers\.1\..*",
    "model.layers.1.self_attn.q_proj",
    r"layers\.(0|11)\.mlp\..+_proj",
    r".*\.layers\.\d+\.(self_attn|mlp)\..*",
    "(?:q|k)_proj",
    r"(layers\.\d+\.)?mlp.up_proj",
    "a)|(.*up_proj",
]


@given(
    pattern=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 64), max_size=5),
    name=st.sampled_from(NAMES),
)
def test_patterns_match_as_in_peft(pattern: dict[str, int], name: str) -> None:
    expected = pattern.get(get_pattern_key(pattern.keys(), name), 8)
    assert read(rank_pattern=pattern).rank(name) == expected
    assert (
        read(alpha_pattern=pattern).scale(name) == pattern.get(get_pattern_key(pattern.keys(), name), 16) / 8
    )


def test_the_slowest_pattern_that_is_let_through_is_bounded() -> None:
    config = read(rank_pattern={".*a.*a.*b": 1})
    began = time.process_time()
    assert config.rank("a." * 80) == 8
    assert time.process_time() - began < 20  # a pattern that explodes would take years
    with pytest.raises(AdapterRejected):
        config.rank("a." * 81)


@pytest.mark.parametrize(
    ("raw", "code", "kind"),
    [
        (b"", Code.INCOMPLETE, AdapterIncomplete),
        (b"\0" * 64, Code.INCOMPLETE, AdapterIncomplete),
        (b'{"r": 8, "peft_ty', Code.INCOMPLETE, AdapterIncomplete),
        (b'{"a": {"b": 1}', Code.INCOMPLETE, AdapterIncomplete),
        (b'{"r": 8,, }', Code.CONFIG_INVALID, AdapterRejected),
        (b'{"r": 8, "r": 9}', Code.CONFIG_INVALID, AdapterRejected),
        (b'{"r": "\xff"}', Code.CONFIG_INVALID, AdapterRejected),
        (b'{"r": ' + b"9" * 5000 + b"}", Code.CONFIG_INVALID, AdapterRejected),
        (b'{"r": ' * 100_000 + b"}" * 100_000, Code.CONFIG_INVALID, AdapterRejected),
        (b"[]", Code.CONFIG_INVALID, AdapterRejected),
        (b" " * (MAX_CONFIG_BYTES + 1), Code.TOO_LARGE, AdapterRejected),
    ],
)
def test_files_that_are_no_config(raw: bytes, code: Code, kind: type[LoraPluginError]) -> None:
    assert code_of(raw) is code
    with pytest.raises(kind):
        AdapterConfig.from_bytes(raw)


def test_every_cut_of_a_config_is_incomplete() -> None:
    raw = json.dumps(GOOD | {"rank_pattern": {"q_proj": 4}, "x": {"y": {}}}, indent=2).encode()
    for end in range(len(raw)):
        assert code_of(raw[:end]) is Code.INCOMPLETE


def test_the_canonical_form_forgets_white_space_and_the_order_of_keys_but_not_of_patterns() -> None:
    spaced = json.dumps(dict(reversed(GOOD.items())), indent=4).encode()
    assert AdapterConfig.from_bytes(spaced).canonical == read().canonical
    assert read(r=9).canonical != read().canonical
    one, other = {"q_proj": 4, "proj": 8}, {"proj": 8, "q_proj": 4}
    assert read(rank_pattern=one).canonical != read(rank_pattern=other).canonical


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*GOOD, "rank_pattern", "alpha_pattern", "use_rslora", "bias", "init_lora_weights"])


@settings(max_examples=100)
@given(changes=st.dictionaries(FIELDS | st.text(max_size=8), JSON, max_size=4))
def test_no_json_escapes_the_family(changes: dict[str, Any]) -> None:
    try:
        config = AdapterConfig.from_bytes(json.dumps(GOOD | changes).encode())
    except LoraPluginError as error:
        json.dumps(error.reason.to_dict()).encode()
        str(error).encode()
    else:
        assert config.rank("model.layers.0.q_proj") > 0
        assert config.scale("model.layers.0.q_proj") > 0


@settings(max_examples=200)
@given(raw=st.binary(max_size=64))
@example(b'{"peft_type": "\\ud800"}')
def test_no_bytes_escape_the_family(raw: bytes) -> None:
    with pytest.raises(LoraPluginError) as caught:
        AdapterConfig.from_bytes(raw)
    str(caught.value).encode()
