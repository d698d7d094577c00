"""What may happen to an adapter's folder: fields of the config, tensors and bytes, changed at random."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adapter_samples import edit_config, edit_tensors
from hypothesis import strategies as st
from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "embed_tokens",
    "lm_head",
)
Change = Callable[[Path], Any]
RANKS = st.integers(1, 16)
ALPHAS = st.one_of(st.integers(1, 64), st.floats(0.125, 64, width=16))
PATTERNS = st.one_of(
    st.sampled_from(MODULES),
    st.sampled_from(
        [
            r".*\.1\..*_proj",
            "self_attn.q_proj",
            "model.layers.0.mlp.up_proj",
            r"layers\.\d\.mlp\.(up|down)_proj",
        ]
    ),
)
WRONG = st.sampled_from([0, -1, None, "8", 2.5, True, float("nan"), 10**30, [], {}])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "r": st.one_of(RANKS, WRONG),
    "lora_alpha": st.one_of(ALPHAS, WRONG),
    "use_rslora": st.one_of(st.booleans(), WRONG),
    "rank_pattern": st.one_of(st.dictionaries(PATTERNS, st.one_of(RANKS, WRONG), max_size=2), WRONG),
    "alpha_pattern": st.one_of(st.dictionaries(PATTERNS, st.one_of(ALPHAS, WRONG), max_size=2), WRONG),
    "peft_type": st.sampled_from(["LORA", "IA3", "LOHA", None, "lora"]),
    "bias": st.sampled_from(["none", "all", "lora_only", "some"]),
    # Not false: of a module without tensors PEFT would make random ones.
    "init_lora_weights": st.sampled_from([True, "gaussian", "pissa", "olora", "eva"]),
    "fan_in_fan_out": st.booleans(),
    "lora_dropout": st.sampled_from([0.0, 0.5]),
    "modules_to_save": st.sampled_from([None, [], ["lm_head"]]),
    "use_dora": st.booleans(),
    "of_the_future": WRONG,
}


@st.composite
def config_edits(draw: st.DrawFn) -> Change:
    field = draw(st.sampled_from(list(FIELDS)))
    value = draw(FIELDS[field])
    return lambda folder: edit_config(folder, **{field: value})


def edit_tensor(position: int, change: str) -> Change:
    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        key = sorted(tensors)[position % len(tensors)]
        tensor = tensors.pop(key)
        match change:
            case "rename":
                tensors[key.replace("q_proj", "k_proj").replace("layers.1", "layers.0")] = tensor
            case "transpose":
                tensors[key] = tensor.T
            case "halve":
                tensors[key] = tensor[: len(tensor) // 2]
            case "one more":
                tensors[key] = torch.cat([tensor, tensor[:1]])
            case "half precision":
                tensors[key] = tensor.bfloat16()
            case "nan":
                tensors[key] = tensor * float("nan")
            case "int":
                tensors[key] = tensor.to(torch.int8)
        return tensors

    return lambda folder: edit_tensors(folder, edit)


def drop_module(position: int) -> Change:
    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        modules = sorted({key.partition(".lora_")[0] for key in tensors})
        return {k: t for k, t in tensors.items() if modules[position % len(modules)] not in k}

    return lambda folder: edit_tensors(folder, edit)


CHANGES = st.one_of(
    config_edits(),
    st.builds(
        edit_tensor,
        st.integers(0, 7),
        st.sampled_from(["drop", "rename", "transpose", "halve", "one more", "half precision", "nan", "int"]),
    ),
    st.builds(drop_module, st.integers(0, 3)),
)


def break_bytes(folder: Path, name: str, position: float, value: bytes | None) -> None:
    """Overwrite some bytes of a file, or cut it off there."""
    path = folder / (CONFIG if name == CONFIG else WEIGHTS)
    raw = bytearray(path.read_bytes())
    size = 8 + int.from_bytes(raw[:8], "little") if name == "header" else len(raw)
    at = int(position * (size - 1))
    if value is None:
        del raw[at:]
    else:
        raw[at : at + len(value)] = value
    path.write_bytes(raw)
