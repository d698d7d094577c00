"""How adapters are trained and saved: each with random, non-zero weights, by PEFT's own `save_pretrained`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from architectures import Architecture
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn


def _all(architecture: Architecture) -> str | list[str]:
    return _of(architecture, architecture.targets)


def _of(architecture: Architecture, targets: tuple[str, ...], head: bool = False) -> str | list[str]:
    heads = [str(architecture.head)] if head else []
    if not architecture.within:
        return [*targets, *heads]
    return "|".join([rf"{architecture.within}.*\.({'|'.join(targets)})", *heads])


@dataclass(frozen=True)
class Feature:
    """One way to train an adapter.

    Attributes:
        config: the fields of its LoraConfig, by architecture.
        dtype: of the files.
        fits: whether the architecture has what it needs.
    """

    config: Callable[[Architecture], dict[str, Any]]
    dtype: torch.dtype = torch.float32
    fits: Callable[[Architecture], bool] = lambda _: True


FEATURES: Final = {
    "plain": Feature(lambda a: {"r": 8, "target_modules": _all(a)}),
    "rslora, r=5": Feature(lambda a: {"r": 5, "use_rslora": True, "target_modules": _all(a)}),
    "rank and alpha patterns": Feature(
        lambda a: {
            "r": 8,
            "target_modules": _all(a),
            "rank_pattern": {a.targets[0]: 3, rf".*\.1\..*{a.targets[-1]}": 16},
            "alpha_pattern": {a.targets[-1]: 5, a.targets[1]: 40},
        }
    ),
    "one module of one layer": Feature(
        lambda a: {"r": 4, "target_modules": rf"{a.within}.*\.1\..*{a.targets[0]}"}
    ),
    "all-linear": Feature(lambda a: {"r": 8, "target_modules": "all-linear"}),
    "float16 files": Feature(lambda a: {"r": 16, "target_modules": _all(a)}, torch.float16),
    "bfloat16 files": Feature(lambda a: {"r": 1, "lora_alpha": 2, "target_modules": _all(a)}, torch.bfloat16),
    "embedding": Feature(lambda a: {"r": 8, "target_modules": _of(a, (a.embedding, a.targets[0]))}),
    "embedding and lm_head": Feature(
        lambda a: {"r": 8, "target_modules": _of(a, (a.embedding, a.targets[0]), head=True)},
        fits=lambda a: a.head is not None,
    ),
    "DoRA": Feature(lambda a: {"r": 8, "use_dora": True, "use_rslora": True, "target_modules": _all(a)}),
    "DoRA, embedding": Feature(
        lambda a: {"r": 5, "use_dora": True, "target_modules": _of(a, (a.embedding, a.targets[0]))}
    ),
    "DoRA, biases": Feature(
        lambda a: {"r": 8, "use_dora": True, "bias": "lora_only", "target_modules": _all(a)}
    ),
    "all biases": Feature(lambda a: {"r": 8, "bias": "all", "target_modules": _of(a, a.targets[-1:])}),
    "trained tokens": Feature(
        lambda a: {"r": 8, "trainable_token_indices": list(range(40, 56)), "target_modules": _all(a)}
    ),
    "modules_to_save": Feature(
        lambda a: {
            "r": 8,
            "modules_to_save": [m for m in (a.embedding, a.head) if m],
            "target_modules": _all(a),
        }
    ),
    "lora_bias": Feature(lambda a: {"r": 14, "lora_bias": True, "target_modules": _all(a)}),
}


def save(feature: Feature, architecture: Architecture, model: nn.Module, target: Path, seed: int) -> Path:
    """Train on nothing, save."""
    torch.manual_seed(seed)
    config = {"lora_alpha": 16} | feature.config(architecture)
    peft_model = get_peft_model(model, LoraConfig(**config))
    for name, parameter in peft_model.named_parameters():
        if re.search(r"lora_(embedding_)?B", name):
            parameter.data.normal_(std=0.3 / config["r"] ** 0.5)
        elif "trainable_tokens_delta" in name:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        elif "modules_to_save" in name:
            parameter.data[::22] += 0.1 * torch.randn_like(parameter[::22])
        elif "magnitude" in name:
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)
        elif "lora_" in name:
            parameter.data.normal_(std=0.08)
        elif name.endswith("bias") and parameter.requires_grad:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    peft_model.to(feature.dtype).save_pretrained(target)
    return target


def attach(model: nn.Module, adapter: Path) -> PeftModel:
    """The adapter as PEFT loads it."""
    return PeftModel.from_pretrained(model, adapter).eval()
