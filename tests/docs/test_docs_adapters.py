"""docs/adapters.md: an example of every row, and what really becomes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import (
    LAYERS,
    LIMIT,
    FusedLlama,
    deltas,
    edit_config,
    edit_tensors,
    llama_layout,
    packed_deltas,
    rename,
    shard,
    train,
)
from documents import DOCS, rows, section

from lora_plugin.adapter.config import _UNSUPPORTED
from lora_plugin.adapter.load import load
from lora_plugin.adapter.names import check_name
from lora_plugin.errors import Code, LoraPluginError
from lora_plugin.layout import ModelLayout

PAGE = DOCS / "adapters.md"
KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Change = Callable[[Path], Any]


def config(**changes: Any) -> Change:
    return lambda folder: edit_config(folder, **changes)


def nothing(folder: Path) -> None:
    pass


def truncate(name: str) -> Change:
    def cut(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) - 10])

    return cut


def link_inside(folder: Path) -> None:
    """As Kubernetes mounts a volume: links to a hidden folder."""
    data = folder / "..data"
    data.mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / name).rename(data / name)
        (folder / name).symlink_to(Path("..data") / name)


def link_out(folder: Path) -> None:
    outside = folder.parent.parent / WEIGHTS
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def tensor(key: str, value: torch.Tensor) -> Change:
    return lambda folder: edit_tensors(folder, lambda old: old | {key: value})


def poison(folder: Path) -> None:
    edit_tensors(folder, lambda old: old | {KEY: old[KEY].clone().fill_(float("nan"))})


# How PEFT trains it, and what happens to the folder afterwards.
SERVED: dict[str, list[tuple[dict[str, Any], Change]]] = {
    "any rank up to `--max-lora-rank`, odd ones too": [({"r": r}, nothing) for r in (1, 5, 64)],
    "`use_rslora`": [({"use_rslora": True}, nothing)],
    "`rank_pattern`, `alpha_pattern`": [
        ({"rank_pattern": {"v_proj": 3, r"layers\.1\..*q_proj": 12}, "alpha_pattern": {"q_proj": 5}}, nothing)
    ],
    "some modules or layers only": [
        ({"target_modules": "all-linear"}, nothing),
        ({"target_modules": r".*\.1\.mlp\.(up|down)_proj"}, config(target_modules=...)),
    ],
    "float32, float16, bfloat16 or float64 weights": [
        ({"dtype": getattr(torch, name)}, nothing) for name in ("float32", "float16", "bfloat16", "float64")
    ],
    "`embed_tokens` and `lm_head` as targets": [({"target_modules": ["embed_tokens", "lm_head"]}, nothing)],
    "weights in several files with an index": [({}, shard)],
    "names without `base_model.model.`, or with the adapter's name in them": [
        ({}, lambda folder: rename(folder, lambda key: key.removeprefix("base_model.model."))),
        ({}, lambda folder: rename(folder, lambda key: key.replace(".weight", ".default.weight"))),
    ],
    "names with or without the wrappers of a multimodal model": [
        (
            {},
            lambda folder: rename(
                folder, lambda key: key.replace("model.model.", "model.language_model.model.")
            ),
        )
    ],
    "trained on packed layers (`qkv_proj`, `gate_up_proj`)": [
        ({"base": FusedLlama(), "target_modules": ["qkv_proj", "gate_up_proj"]}, nothing)
    ],
    "another `base_model_name_or_path`, or none": [
        ({}, config(base_model_name_or_path=name)) for name in ("acme/other", None, ...)
    ],
    "links inside the watched directory, as Kubernetes makes them": [({}, link_inside)],
    "keys of a newer PEFT": [({}, config(of_the_future=[1]))],
}

NOT_WHOLE: dict[str, list[Change]] = {
    "no `adapter_config.json`": [lambda folder: (folder / CONFIG).unlink()],
    "no weights, or not every file of the index": [
        lambda folder: (folder / WEIGHTS).unlink(),
        lambda folder: (shard(folder), next(folder.glob("*-00002-*")).unlink()),
    ],
    "a file shorter than its header says": [truncate(WEIGHTS)],
    "a config that ends in the middle": [truncate(CONFIG)],
}

REFUSED: dict[str, list[Change]] = {
    "another `peft_type` (IA3, AdaLoRA, ...)": [config(peft_type=kind) for kind in ("IA3", "ADALORA", ...)],
    "DoRA (`use_dora`)": [
        config(use_dora=True),
        tensor(KEY.replace("lora_A", "lora_magnitude_vector"), torch.ones(32)),
    ],
    "trained biases (`bias`, `lora_bias`)": [config(bias="all"), config(lora_bias=True)],
    "`modules_to_save`": [config(modules_to_save=["lm_head"])],
    "activated LoRA (`alora_invocation_tokens`)": [config(alora_invocation_tokens=[1])],
    "`layer_replication`": [config(layer_replication=[[0, 1]])],
    "`trainable_token_indices`": [config(trainable_token_indices=[5])],
    "`target_parameters`": [config(target_parameters=["experts.gate_up_proj"])],
    "`use_qalora`, `use_bdlora`": [config(use_qalora=True), config(use_bdlora={"nblocks": 2})],
    "`arrow_config`, `kasa_config`, `monteclora_config`, `megatron_config`": [
        config(**{f"{name}_config": {"x": 1}}) for name in ("arrow", "kasa", "monteclora", "megatron")
    ],
    "relative to a changed base (`init_lora_weights` of PiSSA, OLoRA, CorDA, LoftQ)": [
        config(init_lora_weights=name) for name in ("pissa", "olora", "corda", "loftq")
    ],
    "a resized vocabulary": [
        tensor("base_model.model.model.embed_tokens.base_layer.weight", torch.ones(70, 32))
    ],
    "modules that take no adapter: MoE experts, vision towers, those outside `--lora-target-modules`": [
        lambda folder: rename(folder, lambda key: key.replace("layers.0.self_attn", "layers.0.experts.0"))
    ],
    "`r` missing, null, zero or negative": [config(r=r) for r in (..., None, 0, -8)],
    "`lora_alpha` missing, zero, negative or not finite": [
        config(lora_alpha=alpha) for alpha in (..., 0, -16, float("inf"))
    ],
    "`r` that is not the tensors' rank": [config(r=4)],
    "a rank above `--max-lora-rank`": [config(r=128)],
    "a config that is not a JSON object": [lambda folder: (folder / CONFIG).write_text("[]")],
    "a pattern that is no regular expression, or could take too long": [
        config(rank_pattern={key: 8}) for key in ("q_(proj", "(a*)*b")
    ],
    "pickled weights only": [pickled],
    "a Git LFS pointer, or anything else that is not safetensors": [
        lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
    ],
    "two adapters in one file": [
        lambda folder: rename(
            folder, lambda key: key.replace(".weight", f".{'a' if 'layers.0' in key else 'b'}.weight")
        )
    ],
    "tensors that the model has no module for: all, some, or layers beyond its last": [
        lambda folder: rename(folder, lambda key: key.replace("self_attn", "attention")),
        lambda folder: rename(folder, lambda key: key.replace("0.self_attn", "0.attention")),
        lambda folder: rename(folder, lambda key: key.replace("layers.0", f"layers.{LAYERS}")),
    ],
    "`lora_A` without `lora_B`": [
        lambda folder: edit_tensors(folder, lambda old: {key: old[key] for key in old if key != KEY})
    ],
    "dimensions that are not the module's": [tensor(KEY, torch.ones(8, 40)), tensor(KEY, torch.ones(8, 16))],
    "int8, float8 and other dtypes": [
        tensor(KEY, torch.ones(8, 32).to(dtype)) for dtype in (torch.int8, torch.float8_e4m3fn)
    ],
    "NaN, infinity, or a value beyond the serving dtype": [poison, tensor(KEY, torch.full((8, 32), 1e5))],
    "files above `LORA_PLUGIN_MAX_ADAPTER_BYTES`": [tensor(KEY, torch.ones(8, LIMIT // 32 + 1))],
    "a link that leads out of the watched directory": [link_out],
}

NAMES = {
    "a name outside the grammar": ("-sql", "sql query", "naïve", "a" * 101),
    "a reserved name": ("text", "image", "base"),
}


def documented(title: str) -> dict[str, str]:
    """The second column by the first."""
    return {what: rest.strip("`") for what, rest in rows(section(PAGE, title))}


def examples(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(what, each, id=f"{what[:40]}-{i}")
        for what, all_ in table.items()
        for i, each in enumerate(all_)
    ]


def outcome(folder: Path, layout: ModelLayout) -> LoraPluginError:
    with pytest.raises(LoraPluginError) as caught:
        load(folder.parent, folder.name, layout, None, LIMIT)
    return caught.value


def test_every_row_has_an_example() -> None:
    assert list(documented("Served")) == list(SERVED)
    assert list(documented("Not whole yet")) == list(NOT_WHOLE)
    assert list(documented("Refused")) == [*REFUSED, *NAMES]


def test_every_code_of_a_folder_is_in_errors() -> None:
    statuses = {row[0].strip("`"): row[1] for row in rows((DOCS / "errors.md").read_text())}
    assert all("400" in statuses[code] for code in documented("Refused").values())
    assert all(statuses[code] == "503" for code in documented("Not whole yet").values())


def test_every_feature_that_is_refused_is_named() -> None:
    text = PAGE.read_text()
    assert [field for field in _UNSUPPORTED if f"`{field}`" not in text] == []


@pytest.mark.parametrize(("what", "example"), examples(SERVED))
def test_served(
    what: str, example: tuple[dict[str, Any], Change], tmp_path: Path, layout: ModelLayout
) -> None:
    settings, change = example
    model = train(**settings)
    model.save_pretrained(str(tmp_path / "a"))
    change(tmp_path / "a")
    found = packed_deltas(load(tmp_path, "a", layout, None, LIMIT), layout)
    for name, delta in deltas(model).items():
        path, _, leaf = name.rpartition(".")
        parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
        joined = torch.cat([found.pop(f"{path}.{part}") for part in parts.get(leaf, [leaf])])
        torch.testing.assert_close(joined, delta, rtol=1e-5, atol=1e-6 * float(delta.abs().max()))
    assert not found


@pytest.mark.parametrize(("what", "change"), examples(NOT_WHOLE))
def test_not_whole_yet(what: str, change: Change, folder: Path, layout: ModelLayout) -> None:
    change(folder)
    error = outcome(folder, layout)
    assert (error.code, error.status) == (documented("Not whole yet")[what], 503)


@pytest.mark.parametrize(("what", "change"), examples(REFUSED))
def test_refused(what: str, change: Change, folder: Path, layout: ModelLayout) -> None:
    change(folder)
    if "above `--max-lora-rank`" in what:
        edit_tensors(folder, lambda old: {key: _of_rank(128, key, value) for key, value in old.items()})
    # float16 is the dtype that a value can be beyond.
    error = outcome(folder, replace(layout, dtype="float16"))
    assert (error.code, error.status) == (documented("Refused")[what], 400)


def _of_rank(rank: int, key: str, value: torch.Tensor) -> torch.Tensor:
    return torch.ones(rank, value.shape[1]) if "lora_A" in key else torch.ones(value.shape[0], rank)


@pytest.mark.parametrize("what", NAMES)
def test_names(what: str) -> None:
    for name in NAMES[what]:
        with pytest.raises(LoraPluginError) as caught:
            check_name(name, {"base"})
        assert (caught.value.code, caught.value.status) == (documented("Refused")[what], 400)
    assert Code(documented("Refused")[what])


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    """A copy of a good adapter, alone in a directory that may be the watched one."""
    (tmp_path / "adapters").mkdir()
    return shutil.copytree(saved, tmp_path / "adapters" / "good")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    train().save_pretrained(str(root / "good"))
    assert json.loads((root / "good" / CONFIG).read_text())["r"] == 8
    return root / "good"


@pytest.fixture
def layout() -> ModelLayout:
    return llama_layout()
