"""Quantised bases, int8 (compressed-tensors) and int4 (GPTQ, AWQ), as they are stored; and in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

_CHANNEL: Final = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_GROUP: Final = 32
_ZERO: Final = 8
_GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True}
_AWQ: Final = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": _GROUP,
    "zero_point": True,
    "version": "gemm",
}
_TOKEN: Final = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def write_int8(model: Any, target: Path) -> None:
    """Every linear layer but lm_head as int8, a scale for each output."""
    groups = {"group_0": {"targets": ["Linear"], "weights": _CHANNEL, "input_activations": _TOKEN}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": groups,
    }

    def parts(weight: Tensor) -> dict[str, Tensor]:
        quantised, scale = _quantise(weight)
        return {"weight": quantised.to(torch.int8), "weight_scale": scale}

    _write(model, target, config, parts)


def write_gptq(model: Any, target: Path) -> None:
    """Every linear layer but lm_head in 4 bits, symmetric, as GPTQ stores it."""

    def parts(weight: Tensor) -> dict[str, Tensor]:
        values, scales, zeros = _int4(weight)
        return {
            "qweight": _pack(values.T).T,
            # Of the first version of the format: a zero point is stored less 1.
            "qzeros": _pack(zeros - 1),
            "scales": scales.half(),
            "g_idx": (torch.arange(len(values)) // _GROUP).int(),
        }

    _write(model, target, _GPTQ, parts)


def write_awq(model: Any, target: Path) -> None:
    """The same with zero points, as AWQ stores it: packed along the outputs, in an order of its own."""

    def parts(weight: Tensor) -> dict[str, Tensor]:
        values, scales, zeros = _int4(weight, shifted=True)
        return {
            "qweight": _pack(_in_awq_order(values)),
            "qzeros": _pack(_in_awq_order(zeros)),
            "scales": scales.half(),
        }

    _write(model, target, _AWQ, parts)


def rounded_to_int4(model: nn.Module, *, shifted: bool = False) -> nn.Module:
    """Compute with the weights that the 4 bits stand for, of AWQ where zero points are shifted."""
    for name, module in model.named_modules():
        if name.endswith("_proj") and isinstance(module, nn.Linear):
            values, scales, zeros = (
                part.repeat_interleave(n, 0)
                for part, n in zip(_int4(module.weight, shifted=shifted), (1, _GROUP, _GROUP), strict=True)
            )
            module.weight.data = ((values - zeros) * scales).T.contiguous()
    return model


def _write(
    model: Any, target: Path, quantisation: Mapping[str, Any], parts: Callable[[Tensor], Mapping[str, Tensor]]
) -> None:
    config = model.config.to_dict() | {"quantization_config": quantisation}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        of_layer = parts(tensor) if name.endswith("_proj.weight") else {leaf: tensor}
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in of_layer.items()}
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


def _int4(weight: Tensor, *, shifted: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers from 0 to 15 [in, out]; scales that bfloat16 holds and zeros, both [groups, out]."""
    grouped = weight.detach().float().T.unflatten(0, (-1, _GROUP))
    # So few levels that none is cut off: what was rounded is rounded to itself.
    scales = (grouped.abs().amax(1) / (5 if shifted else 7)).bfloat16().float()
    zeros = torch.full_like(scales, _ZERO)
    if shifted:
        zeros += torch.arange(zeros.numel()).view_as(zeros) % 5 - 2
    values = ((grouped / scales[:, None]).round() + zeros[:, None]).clamp(0, 15)
    return values.flatten(0, 1).int(), scales, zeros.int()


def _pack(values: Tensor) -> Tensor:
    """Eight neighbours of a row in one int32, the first in the lowest bits."""
    shifted = values.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.int32)


def _in_awq_order(values: Tensor) -> Tensor:
    return values.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2)


def _quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers up to 127 in size, and a scale for each row."""
    scale = values.detach().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return (values.detach() / scale).round(), scale
