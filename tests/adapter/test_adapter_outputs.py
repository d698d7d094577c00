"""DoRA and trained biases: a layer's output with the packed adapter is that of PEFT's layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import (
    HIDDEN,
    INNER,
    KV,
    LAYERS,
    LIMIT,
    VOCAB,
    FusedLlama,
    base_model,
    edit_config,
    edit_tensors,
    llama_layout,
    train,
)
from base_weights import WeightsModel
from peft import PeftModel
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load
from lora_plugin.adapter.pack import PackedAdapter, PackedLayer
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.kernels.layer import AFFINE_ROWS
from lora_plugin.layout import AFFINE_ROWS as ROWS_OF_A_PLAN
from lora_plugin.layout import Kind, Layer, ModelLayout

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "target_modules": ALL_LINEAR},
    "dora_rslora_patterns": {
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 3, r"layers\.1\..*v_proj": 12},
        "alpha_pattern": {"v_proj": 5},
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    },
    "dora_embeddings": {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "bias_all": {"bias": "all"},
    "bias_lora_only": {"bias": "lora_only", "target_modules": ["k_proj", "o_proj"]},
    "bias_all_elsewhere": {"bias": "all", "target_modules": ["up_proj"]},
    "dora_bias": {"use_dora": True, "bias": "all"},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
}


def qwen() -> nn.Module:
    """As the tiny Llama, with biases of q, k and v."""
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 8,
        num_key_value_heads=KV // 8,
        tie_word_embeddings=False,
    )
    model: nn.Module = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return model


BASES = {"llama": base_model, "qwen2": qwen}


def trained(base: nn.Module, **config: Any) -> PeftModel:
    """With magnitudes and biases that moved."""
    model = train(base, **config)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)
        elif name.endswith("bias") and parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter))
    return model


def modules(model: PeftModel, layer: Layer) -> Iterator[nn.Module]:
    """PEFT's modules of a layer's slices."""
    for part in layer.slices:
        yield model.get_submodule(f"base_model.model.{part.name}")


def served(packed: PackedLayer, kind: Kind, x: Tensor, y: Tensor) -> Tensor:
    """The layer's output as the kernels make it of the base output y, float64."""
    parts = list(y.split([b.shape[1] for b in packed.b], 1))
    for i, b in enumerate(packed.b):
        a = packed.a[:, i].double()
        parts[i] = parts[i] + (a[:, x].T if kind is Kind.EMBEDDING else x @ a.T) @ b.double()
        if packed.outputs:
            gain, shift = packed.outputs[i].double()
            parts[i] = parts[i] * (1 + gain) + shift
    return torch.cat(parts, 1)


def outputs(
    packed: PackedAdapter, layout: ModelLayout, base: nn.Module, model: PeftModel
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each layer what is served and what PEFT's model makes of the same random inputs, float64."""
    model, base = model.double(), copy.deepcopy(base).double()
    by_layer = {layer.layer: layer for layer in packed.layers}
    for index, layer in enumerate(layout.layers):
        x = torch.randn(9, layer.local_in).double()
        if layer.kind is Kind.EMBEDDING:
            x = torch.arange(VOCAB)
        y = torch.cat([base.get_submodule(part.name)(x) for part in layer.slices], 1)
        expected = torch.cat([module(x) for module in modules(model, layer)], 1)
        yield served(by_layer[index], layer.kind, x, y) if index in by_layer else y, expected


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("base", BASES)
def test_a_layer_s_output_is_peft_s(base: str, name: str, tmp_path: Path) -> None:
    original, layout = BASES[base](), llama_layout()
    model = trained(original, **CONFIGS[name])
    model.save_pretrained(str(tmp_path / "a"))
    packed = load(tmp_path, "a", layout, None, LIMIT, base=WeightsModel(original, layout))
    assert packed.affine == inspect(tmp_path, "a", layout, LIMIT).plan.affine == (packed.rows > packed.rank)
    for found, expected in outputs(packed, layout, original, model):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def test_what_it_was_trained_for_is_not_small(tmp_path: Path) -> None:
    """The test above would pass an adapter that changes nothing."""
    model = trained(qwen(), **CONFIGS["dora_bias"])
    model.save_pretrained(str(tmp_path / "a"))
    layout = llama_layout()
    packed = load(tmp_path, "a", layout, None, LIMIT, base=WeightsModel(qwen(), layout))
    gains, shifts = torch.cat([torch.cat(layer.outputs, 1) for layer in packed.layers if layer.outputs], 1)
    assert gains.abs().mean() > 0.1
    assert shifts.abs().mean() > 0.1


def test_packed_modules_in_the_file(tmp_path: Path) -> None:
    base, layout = FusedLlama(), llama_layout()
    model = trained(base, use_dora=True, target_modules=["qkv_proj", "gate_up_proj"])
    model.save_pretrained(str(tmp_path / "a"))
    split = base_model()
    for i in range(LAYERS):
        fused, layer = base.model.layers[i], split.model.layers[i]
        q, k, v = fused.self_attn.qkv_proj.weight.split([HIDDEN, KV, KV])
        gate, up = fused.mlp.gate_up_proj.weight.chunk(2)
        for name, weight in (("q", q), ("k", k), ("v", v)):
            getattr(layer.self_attn, f"{name}_proj").weight.data = weight
        layer.mlp.gate_proj.weight.data, layer.mlp.up_proj.weight.data = gate, up
    packed = load(tmp_path, "a", layout, None, LIMIT, base=WeightsModel(split, layout))
    for layer in packed.layers:
        path = f"base_model.model.{layout.layers[layer.layer].name}"
        x = torch.randn(5, HIDDEN)
        y = x @ WeightsModel(split, layout).layers[layer.layer].weight.T
        expected = model.get_submodule(path)(x)
        torch.testing.assert_close(served(layer, Kind.LINEAR, x.double(), y.double()).float(), expected)
    base_model.cache_clear()


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True, "bias": "all", "target_modules": ["q_proj", "k_proj", "up_proj"]},
        {"lora_bias": True, "bias": "all", "target_modules": ["q_proj", "o_proj", "down_proj"]},
    ],
)
def test_tensor_parallel_ranks_make_up_the_whole(config: dict[str, Any], tmp_path: Path) -> None:
    original = qwen()
    model = trained(original, **config)
    model.save_pretrained(str(tmp_path / "a"))
    layouts = [llama_layout(ranks=2, rank=rank) for rank in (0, 1)]
    ranks = [load(tmp_path, "a", each, None, LIMIT, base=WeightsModel(original, each)) for each in layouts]
    for pair in zip(*(packed.layers for packed in ranks), strict=True):
        layer = layouts[0].layers[pair[0].layer]
        x = torch.randn(6, layer.slices[0].in_features).double()
        parts = []
        for rank, packed in enumerate(pair):
            weights = WeightsModel(original, layouts[rank]).layers[packed.layer]
            mine = x[:, slice(*layouts[rank].layers[packed.layer].slices[0].in_shard)]
            bias = 0 if weights.bias is None else weights.bias
            y = mine @ weights.weight.double().T + bias
            parts.append(served(packed, Kind.LINEAR, mine, y).split([b.shape[1] for b in packed.b], 1))
        summed = layer.slices[0].in_shard[1] < layer.slices[0].in_features
        found = [sum(p) if summed else torch.cat(p, 1) for p in zip(*parts, strict=True)]
        expected = [module(x.float()).double() for module in modules(model, layer)]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def refused(folder: Path, layout: ModelLayout) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        load(folder.parent, folder.name, layout, None, LIMIT, base=WeightsModel(qwen(), layout))
    return caught.value


def test_a_norm_that_other_ranks_hold_a_part_of_is_refused_by_name(tmp_path: Path) -> None:
    trained(qwen(), use_dora=True, target_modules=["q_proj", "o_proj"]).save_pretrained(str(tmp_path / "a"))
    layout = llama_layout()
    layers = [replace(each, no_dora="cut") if "o_proj" in each.name else each for each in layout.layers]
    error = refused(tmp_path / "a", replace(layout, layers=tuple(layers)))
    assert error.code is Code.FEATURE_UNSUPPORTED
    assert "DoRA" in str(error)
    assert "o_proj" in str(error)


@pytest.mark.parametrize(
    ("config", "change", "code"),
    [
        ({"use_dora": True}, {"use_dora": False}, Code.WEIGHTS_INVALID),
        ({"bias": "all"}, {"bias": "none"}, Code.WEIGHTS_INVALID),
        ({"lora_bias": True}, {"lora_bias": False}, Code.WEIGHTS_INVALID),
        ({}, {"use_dora": True}, Code.TENSOR_PAIR_MISSING),
        ({}, {"lora_bias": True}, Code.TENSOR_PAIR_MISSING),
        ({"use_dora": True, "r": 63}, {}, Code.RANK_TOO_LARGE),
    ],
)
def test_config_and_tensors_must_agree(
    config: dict[str, Any], change: dict[str, Any], code: Code, tmp_path: Path
) -> None:
    trained(qwen(), **config).save_pretrained(str(tmp_path / "a"))
    edit_config(tmp_path / "a", **change)
    assert refused(tmp_path / "a", llama_layout()).code is code


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda m: m[:-1], Code.SHAPE_MISMATCH),
        (lambda m: m[:, None], Code.SHAPE_MISMATCH),
        (lambda m: m * float("nan"), Code.NOT_FINITE),
    ],
)
def test_magnitudes_that_do_not_fit(edit: Any, code: Code, tmp_path: Path) -> None:
    trained(qwen(), use_dora=True).save_pretrained(str(tmp_path / "a"))
    edit_tensors(tmp_path / "a", lambda old: {k: edit(v) if "magnitude" in k else v for k, v in old.items()})
    assert refused(tmp_path / "a", llama_layout()).code is code


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"use_dora": True}, "magnitude"),
        ({"bias": "all"}, "k_proj.bias"),
        ({"lora_bias": True}, "lora_B.bias"),
        ({"lora_bias": True, "lora_alpha": 1e20}, "lora_B.bias"),
    ],
)
def test_finite_values_that_overflow_in_the_model(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Their NaN would reach caches that other requests share."""
    trained(qwen(), **config).save_pretrained(str(tmp_path / "a"))
    large = 1e37 if config.get("lora_alpha") is None else 1e-3
    edit_tensors(
        tmp_path / "a",
        lambda old: {
            k: torch.full_like(v, large) if name in k else v * ("lora_B.weight" not in k)
            for k, v in old.items()
        },
    )
    error = refused(tmp_path / "a", llama_layout())
    assert error.code is Code.NOT_FINITE
    assert name in str(error)
    assert "would overflow" in str(error)


def test_a_weight_row_of_zeros_has_no_direction(tmp_path: Path) -> None:
    trained(qwen(), use_dora=True).save_pretrained(str(tmp_path / "a"))
    edit_tensors(tmp_path / "a", lambda old: {k: v * 0 if "lora_B" in k else v for k, v in old.items()})
    dead = qwen()
    dead.model.layers[0].self_attn.q_proj.weight.data[3] = 0
    layout = llama_layout()
    with pytest.raises(AdapterRejected) as caught:
        load(tmp_path, "a", layout, None, LIMIT, base=WeightsModel(dead, layout))
    assert caught.value.code is Code.NOT_FINITE


def test_biases_of_modules_that_take_no_adapter_are_refused_by_name(tmp_path: Path) -> None:
    trained(qwen(), bias="all").save_pretrained(str(tmp_path / "a"))
    edit_tensors(tmp_path / "a", lambda old: old | {"base_model.model.model.norm.bias": torch.ones(HIDDEN)})
    error = refused(tmp_path / "a", llama_layout())
    assert error.code is Code.FEATURE_UNSUPPORTED
    assert "norm" in str(error)


def test_rows_and_bytes_are_counted(tmp_path: Path) -> None:
    assert ROWS_OF_A_PLAN == AFFINE_ROWS
    layout = llama_layout()
    for name, config in (("plain", {}), ("dora", {"use_dora": True})):
        trained(qwen(), **config).save_pretrained(str(tmp_path / name))
    plain, dora = (inspect(tmp_path, name, layout, LIMIT).plan for name in ("plain", "dora"))
    assert (plain.rank, plain.rows, dora.rank, dora.rows) == (8, 8, 8, 10)
    assert dora.nbytes - plain.nbytes == LAYERS * AFFINE_ROWS * (HIDDEN + 2 * KV) * 4
    packed = load(tmp_path, "dora", layout, None, LIMIT, base=WeightsModel(qwen(), layout))
    assert (packed.rows, packed.slab.nbytes) == (10, dora.nbytes)
