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
    HIDDEN,
    LIMIT,
    VOCAB,
    base_model,
    deltas,
    edit_config,
    llama_layout,
    packed_deltas,
    rename,
    shard,
    train,
)
from base_weights import WeightsModel
from folder_changes import (
    ALPHAS,
    CHANGES,
    CONFIG,
    MODULES,
    PATTERNS,
    RANKS,
    WEIGHTS,
    Change,
    break_bytes,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from test_adapter_outputs import outputs, qwen, trained
from torch import Tensor, nn

from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load, verify
from lora_plugin.errors import LoraPluginError

SLOW = partial(settings, deadline=None, suppress_health_check=list(HealthCheck))

# Any adapter that PEFT can train

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


# All else that can be in an adapter

TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5, unique=True)
RICH = st.fixed_dictionaries(
    {
        "r": RANKS,
        "lora_alpha": ALPHAS,
        "target_modules": st.lists(st.sampled_from(MODULES[:7]), min_size=1, max_size=4, unique=True),
        "bias": st.sampled_from(["none", "all", "lora_only"]),
    },
    optional={
        "use_dora": st.booleans(),
        "lora_bias": st.booleans(),
        "trainable_token_indices": st.fixed_dictionaries({"embed_tokens": TOKENS}),
        "modules_to_save": st.sampled_from([["lm_head"], ["lm_head", "norm"]]),
    },
)


@SLOW(max_examples=60)
@given(config=RICH, rows=TOKENS, changes=st.lists(CHANGES, max_size=2))
def test_layers_answer_as_peft_s_or_a_refusal(
    config: dict[str, Any], rows: list[int], changes: list[Change], tmp_path: Path
) -> None:
    assume(not (config.get("use_dora") and config.get("lora_bias")))
    folder, base, layout = tmp_path / "a", qwen(), llama_layout()
    shutil.rmtree(folder, ignore_errors=True)
    model = trained(base, **config)
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data.add_(torch.randn_like(parameter))
        if "lm_head.modules_to_save" in name:
            parameter.data[rows] += torch.randn(len(rows), HIDDEN)
    model.save_pretrained(str(folder))
    edit_config(folder, init_lora_weights=True)
    for change in changes:
        change(folder)
    try:
        packed = load(tmp_path, "a", layout, None, LIMIT, base=WeightsModel(base, layout))
    except LoraPluginError:
        if changes:
            return
        raise
    for found, expected in outputs(packed, layout, base, loaded(folder, base)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


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
    model = loaded(folder, base_model())
    return {name: delta for name, delta in deltas(model).items() if delta.any()}


def loaded(folder: Path, base: nn.Module) -> PeftModel:
    """The adapter as PEFT loads it."""
    config = json.loads((folder / CONFIG).read_text())
    # PEFT stumbles over null where its own default is meant.
    edit_config(folder, **{key: ... for key, value in config.items() if value is None})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(copy.deepcopy(base), str(folder))


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
