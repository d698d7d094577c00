"""Adapters as PEFT saves them, of a tiny Llama; and what PEFT says that they add to each weight."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.layout import Kind, Layer, ModelLayout, Slice

VOCAB, HIDDEN, INNER, KV, LAYERS = 64, 32, 48, 16, 2
LIMIT = 1 << 24
Shard = tuple[int, int]


def tiny_config(**settings: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )


@cache
def base_model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(tiny_config(tie_word_embeddings=False))
    return model


class FusedLlama(nn.Module):
    """Only the names and shapes of a model whose qkv_proj and gate_up_proj are single modules."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(self._layer() for _ in range(LAYERS))

    @staticmethod
    def _layer() -> nn.Module:
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.qkv_proj = nn.Linear(HIDDEN, HIDDEN + 2 * KV, bias=False)
        layer.self_attn.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        layer.mlp = nn.Module()
        layer.mlp.gate_up_proj = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        return layer


def train(base: nn.Module | None = None, *, dtype: torch.dtype = torch.float32, **config: Any) -> PeftModel:
    """A PEFT model whose lora_A and lora_B are both random."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    model = get_peft_model(
        copy.deepcopy(base or base_model()), LoraConfig(init_lora_weights=False, **(settings | config))
    )
    return model.to(dtype)


def deltas(model: PeftModel) -> dict[str, Tensor]:
    """PEFT's own answer: what the adapter adds to each module's weight, float32, by the module's name."""
    model = model.float()
    return {
        name.removeprefix("base_model.model."): layer.get_delta_weight("default").detach()
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }


def packed_deltas(packed: PackedAdapter, layout: ModelLayout) -> dict[str, Tensor]:
    """The same of a packed adapter, by the slice's name; slices of zeros are left out."""
    found = {}
    for layer in packed.layers:
        kind = layout.layers[layer.layer].kind
        for index, part in enumerate(layout.layers[layer.layer].slices):
            delta = (layer.a[:, index].float().T @ layer.b[index].float()).T
            if delta.any():
                found[part.name] = delta.T if kind is Kind.EMBEDDING else delta
    return found


def llama_layout(
    *, dtype: str = "float32", max_rank: int = 64, ranks: int = 1, rank: int = 0, prefix: str = "model."
) -> ModelLayout:
    """The layout of the tiny Llama, cut for one of `ranks` tensor-parallel ranks."""

    def cut(size: int) -> Shard:
        return (size // ranks * rank, size // ranks * (rank + 1))

    def columns(path: str, packed: str, parts: Mapping[str, int]) -> Layer:
        slices = tuple(Slice(f"{path}.{n}", HIDDEN, out, (0, HIDDEN), cut(out)) for n, out in parts.items())
        return Layer(f"{path}.{packed}", Kind.LINEAR, slices)

    def rows(name: str, size: int) -> Layer:
        return Layer(name, Kind.LINEAR, (Slice(name, size, HIDDEN, cut(size), (0, HIDDEN)),))

    embed, head = f"{prefix}embed_tokens", f"{prefix.removesuffix('model.')}lm_head"
    layers = [Layer(embed, Kind.EMBEDDING, (Slice(embed, VOCAB, HIDDEN, cut(VOCAB), (0, HIDDEN)),))]
    for i in range(LAYERS):
        path = f"{prefix}layers.{i}"
        heads = {"q_proj": HIDDEN, "k_proj": KV, "v_proj": KV}
        layers.append(columns(f"{path}.self_attn", "qkv_proj", heads))
        layers.append(rows(f"{path}.self_attn.o_proj", HIDDEN))
        layers.append(columns(f"{path}.mlp", "gate_up_proj", {"gate_proj": INNER, "up_proj": INNER}))
        layers.append(rows(f"{path}.mlp.down_proj", INNER))
    layers.append(Layer(head, Kind.LM_HEAD, (Slice(head, HIDDEN, VOCAB, (0, HIDDEN), cut(VOCAB)),)))
    return ModelLayout(tuple(layers), dtype, max_rank, {f"{prefix}layers.0.experts": "experts"})


def edit_config(folder: Path, **changes: Any) -> None:
    """Set fields of adapter_config.json; a field given as `...` is removed."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Rewrite the weights."""
    path = folder / "adapter_model.safetensors"
    save_file({key: tensor.contiguous().clone() for key, tensor in edit(load_file(path)).items()}, path)


def rename(folder: Path, new: Callable[[str], str]) -> None:
    """Rename every tensor."""
    edit_tensors(folder, lambda tensors: {new(key): tensor for key, tensor in tensors.items()})


def shard(folder: Path) -> None:
    """Split the weights into two files with an index."""
    single = folder / "adapter_model.safetensors"
    tensors = load_file(single)
    single.unlink()
    names = [f"adapter_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {key: names[i % 2] for i, key in enumerate(sorted(tensors))}
    for name in names:
        save_file({key: tensors[key] for key, file in weight_map.items() if file == name}, folder / name)
    index = folder / "adapter_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
