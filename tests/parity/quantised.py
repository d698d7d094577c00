"""A base of int8 weights and int8 activations, as compressed-tensors stores it; and the same in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

_CHANNEL: Final = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_TOKEN: Final = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def write_int8(model: Any, target: Path) -> None:
    """Every linear layer but lm_head as int8, a scale for each output."""
    config = model.config.to_dict() | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": _CHANNEL, "input_activations": _TOKEN}
            },
        }
    }
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("_proj.weight"):
            quantised, scale = _quantise(tensor)
            tensors[name] = quantised.to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = tensor.contiguous()
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config, default=str))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def fake_int8(model: nn.Module) -> nn.Module:
    """Compute with weights and activations rounded as int8 ones are; what adapters read is not rounded."""
    for name, module in model.named_modules():
        if name.endswith("_proj") and isinstance(module, nn.Linear):
            # Rounded here as well: DoRA takes norms of the weight itself.
            weight, scale = _quantise(module.weight)
            module.weight.data = weight * scale
            module.__class__ = _FakeInt8Linear
    return model


class _FakeInt8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        weight, weight_scale = _quantise(self.weight)
        rounded, scale = _quantise(x)
        return nn.functional.linear(rounded * scale, weight * weight_scale)


def _quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers up to 127 in size, and a scale for each row."""
    scale = values.detach().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return (values.detach() / scale).round(), scale
