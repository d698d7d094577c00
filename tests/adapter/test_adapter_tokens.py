"""Trained tokens: the embedding and the lm_head with the packed adapter are those of PEFT's model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import HIDDEN, LIMIT, VOCAB, edit_config, edit_tensors, llama_layout, tiny_config, train
from base_weights import WeightsModel
from test_adapter_outputs import served
from torch import nn
from transformers import LlamaForCausalLM

from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import Kind, ModelLayout

SAVED = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def llama(*, tied: bool) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = LlamaForCausalLM(tiny_config(tie_word_embeddings=tied))
    return model


def layout_of(*, tied: bool) -> ModelLayout:
    layout = llama_layout()
    layers = [replace(each, tied=tied) if each.kind is Kind.LM_HEAD else each for each in layout.layers]
    return replace(layout, layers=tuple(layers))


def save(folder: Path, base: nn.Module, indices: Any, **config: Any) -> nn.Module:
    """The trained model; PEFT makes the rows those of the base, training moves them."""
    model = train(base, trainable_token_indices=indices, **config)
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data.add_(torch.randn_like(parameter))
    model.save_pretrained(str(folder))
    return model


@pytest.mark.parametrize(
    ("tied", "indices", "changed"),
    [
        (False, [7, 3, 63, 0], {"embed_tokens"}),
        (False, {"embed_tokens": [5, 9]}, {"embed_tokens"}),
        (False, {"embed_tokens": [5, 9], "lm_head": [9, 2, 1]}, {"embed_tokens", "lm_head"}),
        (True, [7, 3, 63], {"embed_tokens", "lm_head"}),
        (True, {"embed_tokens": [7, 3, 63]}, {"embed_tokens", "lm_head"}),
    ],
)
def test_embedding_and_head_are_peft_s(tied: bool, indices: Any, changed: set[str], tmp_path: Path) -> None:
    original, layout = llama(tied=tied), layout_of(tied=tied)
    model = save(tmp_path / "a", copy.deepcopy(original), indices)
    packed = load(tmp_path, "a", layout, None, LIMIT, base=WeightsModel(original, layout))
    by_name = {layout.layers[layer.layer].name.rpartition(".")[2]: layer for layer in packed.layers}
    assert {"embed_tokens", "lm_head"} & by_name.keys() == changed
    tokens = torch.arange(VOCAB)
    x = torch.randn(7, HIDDEN).double()
    for name, path, kind, given in (
        ("embed_tokens", "model.embed_tokens", Kind.EMBEDDING, tokens),
        ("lm_head", "lm_head", Kind.LM_HEAD, x),
    ):
        y = original.double().get_submodule(path)(given)
        expected = model.double().get_submodule(f"base_model.model.{path}")(given)
        found = served(by_name[name], kind, given, y) if name in by_name else y
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert (y - expected).abs().max() > 0.1 or name not in changed


def test_rows_are_counted(tmp_path: Path) -> None:
    layout = layout_of(tied=True)
    save(tmp_path / "a", llama(tied=True), list(range(20)), r=4)
    plan = inspect(tmp_path, "a", layout, LIMIT).plan
    assert (plan.rank, plan.rows) == (20, 20)
    assert plan.targets == ("embed_tokens", "q_proj", "v_proj")
    packed = load(tmp_path, "a", layout, None, LIMIT, base=WeightsModel(llama(tied=True), layout))
    assert packed.nbytes == plan.nbytes == packed.slab.nbytes


def refusal(folder: Path, layout: ModelLayout, base: nn.Module) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        load(folder.parent, folder.name, layout, None, LIMIT, base=WeightsModel(base, layout))
    return caught.value


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"trainable_token_indices": None}, Code.WEIGHTS_INVALID),
        ({"trainable_token_indices": [1, 2]}, Code.SHAPE_MISMATCH),
        ({"trainable_token_indices": [1, 2, 64]}, Code.FEATURE_UNSUPPORTED),
        ({"trainable_token_indices": {"wte": [1, 2, 3]}}, Code.CONFIG_INVALID),
    ],
)
def test_config_and_rows_must_agree(change: dict[str, Any], code: Code, tmp_path: Path) -> None:
    save(tmp_path / "a", llama(tied=True), [1, 2, 3])
    edit_config(tmp_path / "a", **change)
    assert refusal(tmp_path / "a", layout_of(tied=True), llama(tied=True)).code is code


def test_rows_that_are_missing(tmp_path: Path) -> None:
    save(tmp_path / "a", llama(tied=True), [1, 2, 3])
    edit_tensors(tmp_path / "a", lambda old: {k: v for k, v in old.items() if k != SAVED})
    error = refusal(tmp_path / "a", layout_of(tied=True), llama(tied=True))
    assert error.code is Code.TENSOR_PAIR_MISSING


def test_rows_under_two_names_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", llama(tied=True), [1, 2, 3])
    edit_tensors(tmp_path / "a", lambda old: {**old, f"{SAVED}.default": old[SAVED] + 1})
    error = refusal(tmp_path / "a", layout_of(tied=True), llama(tied=True))
    assert (error.code, "twice" in error.reason.message) == (Code.WEIGHTS_INVALID, True)


def test_more_tokens_than_rows_are_refused_with_the_flag_to_raise(tmp_path: Path) -> None:
    save(tmp_path / "a", llama(tied=True), list(range(20)))
    error = refusal(tmp_path / "a", replace(layout_of(tied=True), max_rank=16), llama(tied=True))
    assert error.code is Code.RANK_TOO_LARGE
    assert "--max-lora-rank 32" in str(error)


def test_infinity_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", llama(tied=True), [1, 2, 3])
    edit_tensors(tmp_path / "a", lambda old: {k: v / 0 if k == SAVED else v for k, v in old.items()})
    assert refusal(tmp_path / "a", layout_of(tied=True), llama(tied=True)).code is Code.NOT_FINITE


def test_rows_that_overflow_in_the_model_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", llama(tied=True), [1, 2, 3])
    edit_tensors(tmp_path / "a", lambda old: {k: v * 1e30 if k == SAVED else v for k, v in old.items()})
    error = refusal(tmp_path / "a", layout_of(tied=True), llama(tied=True))
    assert error.code is Code.NOT_FINITE
    assert "would overflow" in str(error)


def without_head(layout: ModelLayout) -> ModelLayout:
    return replace(layout, layers=tuple(each for each in layout.layers if each.kind is not Kind.LM_HEAD))


def cut(layout: ModelLayout) -> ModelLayout:
    return replace(layout, layers=tuple(replace(each, no_dora="cut") for each in layout.layers))


@pytest.mark.parametrize("change", [without_head, cut])
def test_what_cannot_be_right_is_refused_by_name(change: Any, tmp_path: Path) -> None:
    save(tmp_path / "a", llama(tied=True), [1, 2, 3])
    error = refusal(tmp_path / "a", change(layout_of(tied=True)), llama(tied=True))
    assert error.code is Code.FEATURE_UNSUPPORTED
    assert "trainable tokens" in str(error)
