"""Random adapters of a given rank, without training: for any checkpoint, or for any shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Shapes = Mapping[str, tuple[int, int]]
"""(out, in) of each module."""


def write_adapter(
    model: Path, target: Path, rank: int, *, seed: int, targets: Sequence[str] = ALL_LINEAR
) -> Path:
    """Write a folder for a checkpoint, whose header has the shapes; see `write_folder`."""
    shapes = {}
    for checkpoint in sorted(model.glob("*.safetensors")):
        with safe_open(checkpoint, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                module = name.removesuffix(".weight")
                if module != name and module.rpartition(".")[2] in targets:
                    rows, columns = file.get_slice(name).get_shape()
                    shapes[module] = (rows, columns)
    return write_folder(shapes, target, rank, seed=seed, base=model.name)


def write_folder(shapes: Shapes, target: Path, rank: int, *, seed: int, base: str) -> Path:
    """Write a folder as PEFT would, bfloat16, small weights; it appears whole, by a rename."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, (rows, columns) in shapes.items():
        key = f"base_model.model.{module}"
        a = torch.randn(rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, rank, generator=generator) * 0.02
        tensors[f"{key}.lora_A.weight"] = a.bfloat16()
        tensors[f"{key}.lora_B.weight"] = b.bfloat16()
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in shapes}),
        "bias": "none",
        "base_model_name_or_path": base,
    }
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True)
    (partial / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, partial / "adapter_model.safetensors")
    partial.rename(target)
    return target
