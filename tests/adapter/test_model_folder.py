"""A model's layout from its folder; the host's own is compared with it in tests/parity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import HIDDEN, INNER, KV, base_model, llama_layout
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from lora_plugin.layout import EXPERTS, POOLERS, TOWERS, Kind, ModelLayout
from lora_plugin.model_folder.layout import folder_layout, serving_dtype
from lora_plugin.model_folder.locate import ModelUnreadable

LINEAR = "model.layers.0.mlp.down_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    base_model().save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def configure(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add(model: Path, **shapes: tuple[int, ...]) -> None:
    tensors = load_file(model / "model.safetensors")
    added = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    save_file(tensors | added, model / "model.safetensors", {"format": "pt"})


def by_name(layout: ModelLayout) -> dict[str, Any]:
    return {layer.name: (layer.kind, layer.slices) for layer in layout.layers}


def test_the_tiny_llama(model: Path) -> None:
    assert by_name(folder_layout(model, "float32", 64)) == by_name(llama_layout())


def test_sharded_weights(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    for i in (0, 1):
        part = {key: tensor for j, (key, tensor) in enumerate(sorted(tensors.items())) if j % 2 == i}
        save_file(part, model / f"model-0000{i + 1}-of-00002.safetensors")
    assert by_name(folder_layout(model, "float32", 64)) == by_name(llama_layout())


def test_a_tied_head_is_the_embedding_turned_round(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors")
    assert by_name(folder_layout(model, None, 64))["lm_head"] == by_name(llama_layout())["lm_head"]
    configure(model, architectures=["LlamaModel"])
    assert "lm_head" not in by_name(folder_layout(model, None, 64))


@pytest.mark.parametrize(
    ("quantisation", "stored", "shape"),
    [
        ({"quant_method": "gptq", "bits": 4}, "qweight", (INNER // 8, HIDDEN)),
        ({"quant_method": "awq", "bits": 4}, "qweight", (INNER, HIDDEN // 8)),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
            "weight_packed",
            (HIDDEN, INNER // 8),
        ),
    ],
)
def test_quantised_weights(quantisation: dict[str, Any], stored: str, shape: Any, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors[f"{LINEAR}.weight"]
    save_file(tensors, model / "model.safetensors")
    add(model, **{f"{LINEAR}.{stored}": shape, f"{LINEAR}.scales": (2, HIDDEN)})
    configure(model, quantization_config=quantisation)
    assert by_name(folder_layout(model, None, 64))[LINEAR] == by_name(llama_layout())[LINEAR]


def test_packed_layers_get_their_usual_parts(model: Path) -> None:
    tensors = {key: t for key, t in load_file(model / "model.safetensors").items() if "_proj" not in key}
    save_file(tensors, model / "model.safetensors")
    path = "model.layers.0"
    add(
        model,
        **{
            f"{path}.self_attn.qkv_proj.weight": (HIDDEN + 2 * KV, HIDDEN),
            f"{path}.mlp.gate_up_proj.weight": (2 * INNER, HIDDEN),
        },
    )
    found, expected = by_name(folder_layout(model, None, 64)), by_name(llama_layout())
    for name in (f"{path}.self_attn.qkv_proj", f"{path}.mlp.gate_up_proj"):
        assert found[name] == expected[name]


def test_experts_and_towers_take_none(model: Path) -> None:
    experts = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": (4, 4) for i in range(2)}
    add(model, **experts, **{"visual.blocks.0.attn.qkv.weight": (4, 4), "visual.patch.weight": (4, 3, 2, 2)})
    configure(model, vision_config={})
    layout = folder_layout(model, None, 64)
    assert layout.unwrapped == {"model.layers.0.mlp.experts": EXPERTS, "visual.blocks.0.attn.qkv": TOWERS}
    assert by_name(layout) == by_name(llama_layout())
    assert {layer.kind for layer in layout.layers} == set(Kind) - {Kind.CLASSIFIER}


def test_a_pooler_takes_none(tmp_path: Path) -> None:
    config = BertConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=2
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    layout = folder_layout(tmp_path / "bert", None, 64)
    assert layout.unwrapped == {"pooler.dense": POOLERS}
    queries = [part.name for layer in layout.layers for part in layer.slices if "query" in part.name]
    assert queries == ["encoder.layer.0.attention.self.query"]


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_the_dtype_of_the_host(config: dict[str, Any], dtype: str) -> None:
    assert serving_dtype(config) == dtype


def test_what_is_no_model(model: Path, tmp_path: Path) -> None:
    configure(model, quantization_config={"quant_method": "bitsandbytes"})
    for break_it in (
        lambda: None,
        lambda: (model / "config.json").write_text("[]"),
        lambda: (model / "config.json").write_text("{"),
        lambda: ((model / "config.json").write_text("{}"), (model / "model.safetensors").write_bytes(b"x")),
        lambda: (model / "model.safetensors").unlink(),
        lambda: (model / "config.json").unlink(),
    ):
        break_it()
        with pytest.raises(ModelUnreadable):
            folder_layout(model, None, 64)


def test_a_classifier_has_a_head(model: Path) -> None:
    add(model, **{"score.weight": (3, HIDDEN)})
    configure(model, architectures=["LlamaForSequenceClassification"])
    layers = {layer.name: layer for layer in folder_layout(model, None, 64).layers}
    assert layers["score"].kind is Kind.CLASSIFIER
    assert (layers["score"].slices[0].in_features, layers["score"].slices[0].out_features) == (HIDDEN, 3)
