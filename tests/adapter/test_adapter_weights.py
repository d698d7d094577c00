"""Weights that do not fit, or are not what they say: refused under their code, and the key is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adapter_samples import LIMIT, edit_config, edit_tensors, llama_layout, rename, shard, train
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import ModelLayout

KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
STEM = KEY.removesuffix(".lora_A.weight")


def refusal(folder: Path, layout: ModelLayout, *, by_header: bool = True) -> AdapterRejected:
    """What `load` refuses the folder with; the header check must say the same, if it can."""
    with pytest.raises(AdapterRejected) as caught:
        load(folder.parent, folder.name, layout, None, LIMIT)
    if by_header:
        with pytest.raises(AdapterRejected) as seen:
            inspect(folder.parent, folder.name, layout, LIMIT)
        assert seen.value.reason == caught.value.reason
    return caught.value


def set_tensors(**tensors: Tensor) -> Callable[[dict[str, Tensor]], Mapping[str, Tensor]]:
    return lambda old: old | tensors


def swap(key: str, old: str, new: str) -> str:
    return key.replace(old, new)


@pytest.mark.parametrize("r", [4, 16])
def test_a_wrong_r_in_the_config(r: int, folder: Path, layout: ModelLayout) -> None:
    edit_config(folder, r=r)
    error = refusal(folder, layout)
    assert error.code is Code.RANK_MISMATCH
    assert f"r={r}" in str(error)
    assert "r=8" in str(error)


def test_a_rank_pattern_that_the_tensors_do_not_have(folder: Path, layout: ModelLayout) -> None:
    edit_config(folder, rank_pattern={"v_proj": 4})
    error = refusal(folder, layout)
    assert (error.code, "v_proj" in error.reason.message) == (Code.RANK_MISMATCH, True)


def test_a_rank_above_the_hosts(folder: Path) -> None:
    error = refusal(folder, llama_layout(max_rank=4))
    assert error.code is Code.RANK_TOO_LARGE
    assert "r <= 4" in str(error)
    assert "--max-lora-rank 8" in str(error)


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [("model.layers", "model.blocks", "none"), ("layers.1", "layers.7", "only 2"), ("q_proj", "q", "only 2")],
)
def test_names_that_the_model_lacks(
    old: str, new: str, count: str, folder: Path, layout: ModelLayout
) -> None:
    rename(folder, lambda key: swap(key, old, new))
    error = refusal(folder, layout)
    assert error.code is Code.TENSOR_UNKNOWN
    assert error.reason.message.startswith(count)
    assert "layers 0..1" in (error.reason.expected or "")
    assert new in (error.reason.found or "")


def test_the_layers_of_a_vision_tower_are_not_the_language_models(folder: Path, layout: ModelLayout) -> None:
    rename(folder, lambda key: swap(key, "model.model.layers", "model.vision_tower.layers"))
    assert refusal(folder, layout).code is Code.TENSOR_UNKNOWN


def test_names_that_fit_two_modules(folder: Path) -> None:
    one, other = llama_layout(prefix="model."), llama_layout(prefix="language_model.model.")
    both = replace(one, layers=one.layers + other.layers)
    rename(folder, lambda key: swap(key, "model.model.layers", "layers"))
    error = refusal(folder, both)
    assert error.code is Code.TENSOR_UNKNOWN
    assert "'language_model.model.layers.0.self_attn" in (error.reason.found or "")


def test_two_modules_that_are_one(folder: Path, layout: ModelLayout) -> None:
    def double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {swap(key, "model.model.layers", "layers"): tensors[key] for key in tensors}

    edit_tensors(folder, double)
    assert refusal(folder, layout).code is Code.TENSOR_UNKNOWN


def test_modules_that_take_no_adapter(folder: Path, layout: ModelLayout) -> None:
    rename(folder, lambda key: swap(key, "layers.0.self_attn", "layers.0.experts.3"))
    error = refusal(folder, layout)
    assert error.code is Code.FEATURE_UNSUPPORTED
    assert "experts" in error.reason.message


@pytest.mark.parametrize(("part", "other"), [("A", "B"), ("B", "A")])
def test_half_a_pair(part: str, other: str, folder: Path, layout: ModelLayout) -> None:
    gone = f"{STEM}.lora_{other}.weight"
    edit_tensors(folder, lambda tensors: {key: t for key, t in tensors.items() if key != gone})
    error = refusal(folder, layout)
    assert error.code is Code.TENSOR_PAIR_MISSING
    assert f"{STEM}.lora_{part}.weight" in error.reason.message
    assert gone in (error.reason.expected or "")


@pytest.mark.parametrize("shape", [(8, 31), (8, 64), (8,), (8, 32, 1), (0,), (8, 0)])
def test_a_shape_that_is_not_the_modules(shape: tuple[int, ...], folder: Path, layout: ModelLayout) -> None:
    edit_tensors(folder, set_tensors(**{KEY: torch.zeros(shape)}))
    error = refusal(folder, layout)
    assert error.code is Code.SHAPE_MISMATCH
    assert error.reason.expected == "shape [8, 32]"
    assert error.reason.found == f"shape {list(shape)}"


@pytest.mark.parametrize("shape", [(16, 8), (64, 8), (32, 4), (8, 32)])
def test_a_lora_b_that_does_not_fit(shape: tuple[int, ...], folder: Path, layout: ModelLayout) -> None:
    edit_tensors(folder, set_tensors(**{f"{STEM}.lora_B.weight": torch.zeros(shape)}))
    assert refusal(folder, layout).code is Code.SHAPE_MISMATCH


def test_a_vocabulary_of_another_size(tmp_path: Path, layout: ModelLayout) -> None:
    train(target_modules=["embed_tokens"]).save_pretrained(str(tmp_path / "a"), save_embedding_layers=False)
    key = "base_model.model.model.embed_tokens.lora_embedding_A"
    edit_tensors(tmp_path / "a", set_tensors(**{key: torch.zeros(8, 70)}))
    assert refusal(tmp_path / "a", layout).code is Code.SHAPE_MISMATCH


def test_an_embedding_stored_as_a_linear_layer(tmp_path: Path, layout: ModelLayout) -> None:
    train(target_modules=["embed_tokens"]).save_pretrained(str(tmp_path / "a"), save_embedding_layers=False)
    rename(tmp_path / "a", lambda key: key.replace("lora_embedding_A", "lora_A.weight"))
    assert refusal(tmp_path / "a", layout).code is Code.TENSOR_PAIR_MISSING
    rename(tmp_path / "a", lambda key: key.replace("lora_embedding_B", "lora_B.weight"))
    assert refusal(tmp_path / "a", layout).code is Code.SHAPE_MISMATCH


@pytest.mark.parametrize("shape", [(70, 32), (32, 64)])
def test_the_base_weight_of_a_resized_vocabulary(
    shape: tuple[int, int], tmp_path: Path, layout: ModelLayout
) -> None:
    train(target_modules=["embed_tokens"]).save_pretrained(str(tmp_path / "a"), save_embedding_layers=False)
    copy = "base_model.model.model.embed_tokens.base_layer.weight"
    edit_tensors(tmp_path / "a", set_tensors(**{copy: torch.zeros(shape)}))
    assert refusal(tmp_path / "a", layout).code is Code.FEATURE_UNSUPPORTED


@pytest.mark.parametrize(
    ("key", "feature"),
    [
        (f"{STEM}.lora_diag", "KaSA"),
        (f"{STEM}.lora_monteclora_sampler.w", "MonteCLoRA"),
        ("base_model.model.lm_head.weight", "whole weight"),
        ("base_model.model.score.modules_to_save.default.weight", "modules_to_save"),
    ],
)
def test_tensors_of_other_features(key: str, feature: str, folder: Path, layout: ModelLayout) -> None:
    edit_tensors(folder, set_tensors(**{key: torch.zeros(32)}))
    error = refusal(folder, layout)
    assert error.code is Code.FEATURE_UNSUPPORTED
    assert feature in error.reason.message


@pytest.mark.parametrize(
    ("key", "feature"),
    [
        (f"{STEM}.lora_magnitude_vector", "DoRA"),
        (f"{STEM}.lora_magnitude_vector.default.weight", "DoRA"),
        (f"{STEM}.lora_B.bias", "bias"),
        (f"{STEM}.lora_B.default.bias", "bias"),
        (f"{STEM}.base_layer.bias", "bias"),
        (f"{STEM}.bias", "bias"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "trainable tokens"),
    ],
)
def test_vectors_that_the_config_does_not_name(
    key: str, feature: str, folder: Path, layout: ModelLayout
) -> None:
    edit_tensors(folder, set_tensors(**{key: torch.zeros(32)}))
    error = refusal(folder, layout)
    assert error.code is Code.WEIGHTS_INVALID
    assert feature in error.reason.message


@pytest.mark.parametrize("key", ["something", "lora_A.weight", f"{STEM}.lora_C", f"{STEM}.lora_A"])
def test_tensors_of_no_kind(key: str, folder: Path, layout: ModelLayout) -> None:
    edit_tensors(folder, set_tensors(**{key: torch.zeros(1)}))
    assert refusal(folder, layout).code is Code.TENSOR_UNKNOWN


def test_no_tensors_at_all(folder: Path, layout: ModelLayout) -> None:
    edit_tensors(folder, lambda _: {})
    assert refusal(folder, layout).code is Code.WEIGHTS_INVALID


def test_two_adapters_in_one_file(folder: Path, layout: ModelLayout) -> None:
    def name(key: str) -> str:
        return key.replace(".weight", f".{'one' if 'layers.0' in key else 'two'}.weight")

    rename(folder, name)
    error = refusal(folder, layout)
    assert error.code is Code.WEIGHTS_INVALID
    assert error.reason.found == "'one', 'two'"


def test_a_packed_name_beside_a_split_one(folder: Path, layout: ModelLayout) -> None:
    packed = STEM.replace("q_proj", "qkv_proj")
    tensors = {f"{packed}.lora_A.weight": torch.zeros(8, 32), f"{packed}.lora_B.weight": torch.zeros(64, 8)}
    edit_tensors(folder, set_tensors(**tensors))
    error = refusal(folder, layout)
    assert (error.code, "twice" in error.reason.message) == (Code.WEIGHTS_INVALID, True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_dtypes_that_are_not_served(dtype: torch.dtype, folder: Path, layout: ModelLayout) -> None:
    edit_tensors(folder, lambda tensors: tensors | {KEY: tensors[KEY].to(dtype)})
    error = refusal(folder, layout)
    assert error.code is Code.DTYPE_UNSUPPORTED
    assert KEY in error.reason.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["A", "B"])
@pytest.mark.parametrize("rank", [0, 1])
def test_values_that_are_not_finite(value: float, part: str, rank: int, folder: Path) -> None:
    key = f"{STEM}.lora_{part}.weight"

    def poison(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[key][-1, -1] = value
        return tensors

    edit_tensors(folder, poison)
    # Every rank refuses, whichever holds the element.
    error = refusal(folder, llama_layout(ranks=2, rank=rank), by_header=False)
    assert error.code is Code.NOT_FINITE
    assert key in error.reason.message
    assert error.reason.found == "NaN or infinity"


@pytest.mark.parametrize(("part", "value"), [("A", 1e5), ("B", 4e4)])
def test_values_beyond_the_serving_dtype(part: str, value: float, folder: Path, layout: ModelLayout) -> None:
    key = f"{STEM}.lora_{part}.weight"
    other = f"{STEM}.lora_{'B' if part == 'A' else 'A'}.weight"
    edit_tensors(
        folder, lambda old: old | {key: torch.full_like(old[key], value), other: torch.zeros_like(old[other])}
    )
    load(folder.parent, "good", layout, None, LIMIT)
    error = refusal(folder, replace(layout, dtype="float16"), by_header=False)
    assert error.code is Code.NOT_FINITE
    assert "float16" in (error.reason.found or "")


def test_a_float64_that_float32_cannot_hold(folder: Path, layout: ModelLayout) -> None:
    edit_tensors(folder, lambda tensors: tensors | {KEY: torch.full((8, 32), 1e300, dtype=torch.float64)})
    assert refusal(folder, layout, by_header=False).code is Code.NOT_FINITE


def test_an_index_that_disagrees_with_the_files(folder: Path, layout: ModelLayout) -> None:
    shard(folder)
    index = folder / "adapter_model.safetensors.index.json"
    document = json.loads(index.read_text())
    files = sorted(set(document["weight_map"].values()))
    for weight_map in (
        document["weight_map"] | {KEY: next(f for f in files if f != document["weight_map"][KEY])},
        document["weight_map"] | {"gone.lora_A.weight": files[0]},
        {key: file for key, file in document["weight_map"].items() if key != KEY},
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert refusal(folder, layout).code is Code.WEIGHTS_INVALID


def test_a_tensor_in_two_files(folder: Path, layout: ModelLayout) -> None:
    shard(folder)
    first, second = sorted(folder.glob("*.safetensors"))
    tensors = load_file(second)
    save_file(tensors | {next(iter(load_file(first))): torch.zeros(1)}, second)
    assert refusal(folder, layout).code is Code.WEIGHTS_INVALID
