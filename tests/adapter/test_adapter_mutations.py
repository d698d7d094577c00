"""Whatever is done to a good folder: it adds what PEFT's formula says of the files, or it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adapter_samples import LIMIT, llama_layout, packed_deltas
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load, verify
from lora_plugin.errors import LoraPluginError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Mutation = Callable[[Path], None]


def naive(folder: Path) -> dict[str, Tensor]:
    """scale * B A by the plainest reading of the files."""
    config = json.loads((folder / CONFIG).read_text())
    r, alpha = config["r"], config["lora_alpha"]
    scale = alpha / r**0.5 if config["use_rslora"] else alpha / r
    tensors = load_file(folder / WEIGHTS)
    return {
        "model.layers." + key.partition("layers.")[2].removesuffix(".lora_A.weight"): scale
        * (tensors[key.replace("lora_A", "lora_B")].float() @ tensor.float())
        for key, tensor in tensors.items()
        if "lora_A" in key
    }


def edit_text(field: str, value: Any) -> Mutation:
    def edit(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | {field: value}))

    return edit


def edit_bytes(name: str, position: float, value: bytes) -> Mutation:
    def edit(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        at = int(position * (len(raw) - 1))
        raw[at : at + len(value)] = value
        (folder / name).write_bytes(raw)

    return edit


def edit_header(position: float, value: int) -> Mutation:
    def edit(folder: Path) -> None:
        raw = bytearray((folder / WEIGHTS).read_bytes())
        raw[int(position * (7 + int.from_bytes(raw[:8], "little")))] = value
        (folder / WEIGHTS).write_bytes(raw)

    return edit


def cut(name: str, keep: float) -> Mutation:
    def edit(folder: Path) -> None:
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[: int(keep * len(raw))])

    return edit


def edit_tensor(index: int, change: str) -> Mutation:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        key = sorted(tensors)[index]
        tensor = tensors.pop(key)
        match change:
            case "rename":
                tensors[key.replace("q_proj", "k_proj").replace("layers.1", "layers.0")] = tensor
            case "transpose":
                tensors[key] = tensor.T.contiguous()
            case "halve":
                tensors[key] = tensor[: len(tensor) // 2].clone()
            case "half precision":
                tensors[key] = tensor.bfloat16()
            case "nan":
                tensors[key] = tensor * float("nan")
        save_file(tensors, folder / WEIGHTS)

    return edit


FRACTIONS = st.floats(0, 1)
MUTATIONS = st.one_of(
    st.builds(edit_text, st.just("r"), st.sampled_from([4, 8, 16, 0, None])),
    st.builds(edit_text, st.just("lora_alpha"), st.sampled_from([1, 2.5, 64, -1])),
    st.builds(edit_text, st.just("use_rslora"), st.booleans()),
    st.builds(edit_bytes, st.sampled_from([CONFIG, WEIGHTS]), FRACTIONS, st.binary(min_size=1, max_size=4)),
    st.builds(edit_header, FRACTIONS, st.integers(0, 255)),
    st.builds(cut, st.sampled_from([CONFIG, WEIGHTS]), FRACTIONS),
    st.builds(
        edit_tensor,
        st.integers(0, 7),
        st.sampled_from(["drop", "rename", "transpose", "halve", "half precision", "nan"]),
    ),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutations=st.lists(MUTATIONS, min_size=1, max_size=2))
def test_right_or_refused(mutations: list[Mutation], saved: Path, tmp_path: Path) -> None:
    layout = llama_layout()
    folder = tmp_path / "a"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    for mutate in mutations:
        try:
            mutate(folder)
        except Exception:  # the second mutation met a file that the first one broke
            break
    try:
        seen = inspect(tmp_path, "a", layout, LIMIT)
        digest = verify(tmp_path, "a", seen.snapshot)
        packed = load(tmp_path, "a", layout, digest, LIMIT)
    except LoraPluginError as error:
        str(error).encode()
        return
    found, wanted = packed_deltas(packed, layout), naive(folder)
    assert found.keys() <= wanted.keys()
    for name, delta in wanted.items():
        expected = found.get(name, torch.zeros_like(delta))
        torch.testing.assert_close(expected, delta, rtol=1e-4, atol=1e-5 * float(delta.abs().max()))
