"""Whatever a folder holds: it adds what PEFT adds when PEFT loads it, or it is refused with a code."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import (
    LIMIT,
    base_model,
    deltas,
    edit_config,
    edit_tensors,
    llama_layout,
    packed_deltas,
    rename,
    shard,
    train,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch import Tensor

from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load, verify
from lora_plugin.errors import LoraPluginError

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
SLOW = partial(settings, deadline=None, suppress_health_check=list(HealthCheck))

# Any adapter that PEFT can train

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
TARGETS = st.one_of(
    st.lists(st.sampled_from(MODULES), min_size=1, max_size=5, unique=True),
    st.sampled_from(["all-linear", r".*\.1\.mlp\..*_proj", r".*layers\.0.*\.[qv]_proj|lm_head"]),
)
ADAPTERS = st.fixed_dictionaries(
    {
        "r": RANKS,
        "lora_alpha": ALPHAS,
        "use_rslora": st.booleans(),
        "target_modules": TARGETS,
        # Sorted as in the file: the first pattern that matches decides.
        "rank_pattern": st.dictionaries(PATTERNS, RANKS, max_size=2).map(lambda d: dict(sorted(d.items()))),
        "alpha_pattern": st.dictionaries(PATTERNS, ALPHAS, max_size=2).map(lambda d: dict(sorted(d.items()))),
        "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    }
)
PREFIXES: dict[str, Callable[[str], str]] = {
    "as PEFT names them": lambda key: key,
    "bare": lambda key: key.removeprefix("base_model.model."),
    "multimodal": lambda key: key.replace("model.model.", "model.model.language_model.", 1),
    "compiled": lambda key: key.replace("base_model.model.", "base_model.model._orig_mod.", 1),
}


@SLOW(max_examples=30)
@given(adapter=ADAPTERS, prefix=st.sampled_from(list(PREFIXES)), sharded=st.booleans())
def test_any_adapter_of_peft_is_served(
    adapter: dict[str, Any], prefix: str, sharded: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    shutil.rmtree(folder, ignore_errors=True)
    model = train(**adapter)
    model.save_pretrained(str(folder))
    rename(folder, PREFIXES[prefix])
    if sharded:
        shard(folder)
    found = served(folder)
    assert isinstance(found, dict), found
    assert_same(found, deltas(model))


# What may happen to a folder

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


@SLOW(max_examples=60)
@given(changes=st.lists(CHANGES, min_size=1, max_size=2))
def test_what_peft_loads_or_a_refusal(changes: list[Change], saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path / "a")
    # Modules without tensors add nothing, in PEFT too.
    edit_config(folder, init_lora_weights=True)
    for change in changes:
        change(folder)
    found = served(folder)
    if not isinstance(found, LoraPluginError):
        assert_same(found, by_peft(folder))


# Bytes

FRACTIONS = st.floats(0, 1)


@SLOW(max_examples=80)
@given(
    name=st.sampled_from([CONFIG, WEIGHTS, "header"]),
    position=FRACTIONS,
    value=st.one_of(st.binary(min_size=1, max_size=4), st.just(None)),
)
def test_broken_bytes(name: str, position: float, value: bytes | None, saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path / "a")
    before = json.loads((folder / CONFIG).read_text())
    break_bytes(folder, name, position, value)
    found = served(folder)
    if isinstance(found, LoraPluginError):
        return
    # These are not read: the tensors say what is targeted.
    after = json.loads((folder / CONFIG).read_text())
    assume(all(after.get(key, ...) == before[key] for key in before if "modules" in key or "layers" in key))
    assert_same(found, by_peft(folder))


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


# Both sides


def copied(saved: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(saved, target)


def served(folder: Path) -> dict[str, Tensor] | LoraPluginError:
    """What the plugin adds to each module, or its refusal."""
    root, layout = folder.parent, llama_layout()
    try:
        seen = inspect(root, folder.name, layout, LIMIT)
        digest = verify(root, folder.name, seen.snapshot)
        return packed_deltas(load(root, folder.name, layout, digest, LIMIT), layout)
    except LoraPluginError as error:
        str(error).encode()
        return error


def by_peft(folder: Path) -> dict[str, Tensor]:
    """What PEFT adds to each module when it loads the folder, without modules that it leaves alone."""
    config = json.loads((folder / CONFIG).read_text())
    # PEFT stumbles over null where its own default is meant.
    edit_config(folder, **{key: ... for key, value in config.items() if value is None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(copy.deepcopy(base_model()), str(folder))
    return {name: delta for name, delta in deltas(model).items() if delta.any()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, delta in expected.items():
        torch.testing.assert_close(found[name], delta, rtol=1e-4, atol=1e-5 * float(delta.abs().max()))


def test_the_two_sides_differ_when_they_should(saved: Path, tmp_path: Path) -> None:
    """The comparison sees a wrong scale."""
    folder = copied(saved, tmp_path / "a")
    found = served(folder)
    edit_config(folder, lora_alpha=17)
    with pytest.raises(AssertionError):
        assert_same(found, by_peft(folder))  # type: ignore[arg-type]
