"""A model's layout from its folder, as the host would make it: which layers take adapters, packed how.

What the host does with a model's modules is followed for its usual packing. A model that it packs in another
way gets the same verdicts; only the packed size may differ by some A rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from lora_plugin.adapter.targets import core_name
from lora_plugin.layout import EXPERTS, PACKED, POOLERS, TOWERS, Kind, Layer, ModelLayout, Slice
from lora_plugin.model_folder.locate import read_config
from lora_plugin.model_folder.modules import Module, modules, read_shapes

_PACKED: Final = (*PACKED.items(), ("qkv_proj", ("query", "key", "value")))
_LANGUAGE: Final = ("layers.", "embed_tokens", "lm_head")
_GENERATES: Final = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def folder_layout(folder: Path, dtype: str | None, max_rank: int) -> ModelLayout:
    """The layout of the model in `folder`, unsharded.

    Args:
        folder: config.json and safetensors files.
        dtype: the serving dtype, "bfloat16", "float16" or "float32"; None for the one the host would take.
        max_rank: `--max-lora-rank`.

    Raises:
        ModelUnreadable: the files do not say what the model looks like.
    """
    config = read_config(folder)
    text = config.get("text_config") or config
    shapes = read_shapes(folder)
    found = list(modules(shapes, config))
    unwrapped = {path: EXPERTS for path in map(_experts, shapes) if path is not None}
    unwrapped |= {m.name: POOLERS for m in found if core_name(m.name).startswith("pooler.")}
    if "text_config" in config or "vision_config" in config:
        unwrapped |= {m.name: TOWERS for m in found if not core_name(m.name).startswith(_LANGUAGE)}
    taken = [module for module in found if module.name not in unwrapped and _experts(module.name) is None]
    layers = (*_layers(taken, text), *_tied_head(taken, config))
    return ModelLayout(layers, dtype or serving_dtype(config), max_rank, unwrapped)


def serving_dtype(config: Mapping[str, Any]) -> str:
    """What the host's `--dtype auto` means for a model: its own dtype, bfloat16 for a float32 one."""
    text = config.get("text_config") or {}
    found = next((c[key] for c in (config, text) for key in ("dtype", "torch_dtype") if c.get(key)), None)
    return "float16" if found == "float16" else "bfloat16"


def _experts(name: str) -> str | None:
    """The path of the expert layer that a tensor or module belongs to."""
    head, found, _ = name.partition(".experts.")
    return f"{head}.experts" if found else None


def _layers(found: Iterable[Module], config: Mapping[str, Any]) -> list[Layer]:
    by_name = {module.name: module for module in found}
    layers: dict[str, Layer] = {}
    for module in by_name.values():
        layer = _packed(module, by_name) or _alone(module, config)
        layers.setdefault(layer.name, layer)
    return list(layers.values())


def _packed(module: Module, by_name: Mapping[str, Module]) -> Layer | None:
    """The layer that the host makes of a module and its neighbours."""
    parent, dot, leaf = module.name.rpartition(".")
    for packed, leaves in _PACKED:
        parts = [by_name.get(f"{parent}{dot}{part}") for part in leaves]
        if leaf in leaves and all(part is not None and part.inputs == module.inputs for part in parts):
            slices = tuple(_slice(part.name, part.inputs, part.outputs) for part in parts if part is not None)
            return Layer(f"{parent}{dot}{packed}", Kind.LINEAR, slices)
    return None


def _alone(module: Module, config: Mapping[str, Any]) -> Layer:
    parent, dot, leaf = module.name.rpartition(".")
    names, sizes = [module.name], [module.outputs]
    if leaf in PACKED:
        names = [f"{parent}{dot}{part}" for part in PACKED[leaf]]
        sizes = [sizes[0] // 2] * 2 if leaf == "gate_up_proj" else _qkv_sizes(module.outputs, config)
    slices = (_slice(name, module.inputs, size) for name, size in zip(names, sizes, strict=True))
    return Layer(module.name, module.kind, tuple(slices))


def _qkv_sizes(outputs: int, config: Mapping[str, Any]) -> list[int]:
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = outputs // (heads + 2 * kv_heads)
    ends = [0, heads * size, (heads + kv_heads) * size, outputs]
    return [stop - start for start, stop in pairwise(ends)]


def _tied_head(found: Iterable[Module], config: Mapping[str, Any]) -> list[Layer]:
    """lm_head of a model that stores none of its own: the token embedding, turned round."""
    kinds = {module.kind: module for module in found}
    embedding = kinds.get(Kind.EMBEDDING)
    architectures = config.get("architectures") or [""]
    if Kind.LM_HEAD in kinds or embedding is None or not str(architectures[0]).endswith(_GENERATES):
        return []
    part = _slice("lm_head", embedding.outputs, embedding.inputs)
    return [Layer("lm_head", Kind.LM_HEAD, (part,), tied=True)]


def _slice(name: str, inputs: int, outputs: int) -> Slice:
    return Slice(name, inputs, outputs, (0, inputs), (0, outputs))
