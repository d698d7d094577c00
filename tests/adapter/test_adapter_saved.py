"""Modules that PEFT saved whole: served as PEFT serves them while few rows differ, else refused by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import HIDDEN, LIMIT, VOCAB, edit_config, edit_tensors, llama_layout
from base_weights import WeightsModel
from peft import LoraConfig, PeftModel, get_peft_model
from test_adapter_outputs import served
from test_adapter_tokens import layout_of, llama
from torch import Tensor, nn

from lora_plugin.adapter import pack_saved
from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load
from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import Kind, ModelLayout

EMBEDDING = "base_model.model.model.embed_tokens.weight"
HEAD = "base_model.model.lm_head.weight"
SCORE = "base_model.model.score.weight"
TWICE = {
    HEAD: torch.ones(VOCAB, HIDDEN),
    HEAD.replace("weight", "lora_A.weight"): torch.ones(4, HIDDEN),
    HEAD.replace("weight", "lora_B.weight"): torch.ones(VOCAB, 4),
}
ROWS = [0, 5, 9, 63]


def save(
    folder: Path,
    base: nn.Module,
    changed: dict[str, list[int]],
    dtype: torch.dtype = torch.float32,
    **kw: Any,
) -> Path:
    """An adapter whose saved modules have changed rows, by the ends of their names."""
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model = get_peft_model(
        copy.deepcopy(base), LoraConfig(**(settings | {"modules_to_save": [*changed]} | kw))
    )
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        module = name.partition(".modules_to_save.")[0].rpartition(".")[2]
        if "modules_to_save" in name and module in changed:
            parameter.data[changed[module]] += torch.randn_like(parameter[changed[module]])
    model.to(dtype).save_pretrained(str(folder))
    return folder


def pack(folder: Path, base: nn.Module, layout: ModelLayout) -> PackedAdapter:
    return load(folder.parent, folder.name, layout, None, LIMIT, base=WeightsModel(base, layout))


def refusal(folder: Path, base: nn.Module, layout: ModelLayout) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        pack(folder, base, layout)
    return caught.value


def check_as_peft(folder: Path, base: nn.Module, layout: ModelLayout, changed: set[str]) -> None:
    """Embedding and lm_head with the packed adapter compute what they do in the model that PEFT loads."""
    packed = pack(folder, base, layout)
    model = PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).double()
    by_name = {layout.layers[layer.layer].name.rpartition(".")[2]: layer for layer in packed.layers}
    assert {"embed_tokens", "lm_head"} & by_name.keys() == changed
    x = torch.randn(7, HIDDEN).double()
    for name, path, kind, given in (
        ("embed_tokens", "model.embed_tokens", Kind.EMBEDDING, torch.arange(VOCAB)),
        ("lm_head", "lm_head", Kind.LM_HEAD, x),
    ):
        y = copy.deepcopy(base).double().get_submodule(path)(given)
        expected = model.get_submodule(f"base_model.model.{path}")(given)
        found = served(by_name[name], kind, given, y) if name in by_name else y
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert (y - expected).abs().max() > 0.1 or name not in changed


@pytest.mark.parametrize("blocks", [1 << 24, 3 * HIDDEN * 4])
@pytest.mark.parametrize(
    ("tied", "changed", "config", "served_layers"),
    [
        (False, {"embed_tokens": ROWS}, {}, {"embed_tokens"}),
        (False, {"lm_head": [7]}, {}, {"lm_head"}),
        (False, {"embed_tokens": ROWS, "lm_head": [9, 2]}, {}, {"embed_tokens", "lm_head"}),
        (False, {"embed_tokens": [3]}, {"use_dora": True}, {"embed_tokens"}),
        (False, {"embed_tokens": []}, {}, set()),
        # A head that is tied to the embedding stays as it was, unless PEFT was told otherwise.
        (True, {"embed_tokens": ROWS}, {}, {"embed_tokens"}),
        (True, {"lm_head": ROWS}, {}, {"lm_head"}),
        (True, {"embed_tokens": ROWS}, {"ensure_weight_tying": True}, {"embed_tokens", "lm_head"}),
    ],
)
def test_rows_that_differ_are_peft_s(
    tied: bool,
    changed: dict[str, list[int]],
    config: dict[str, Any],
    served_layers: set[str],
    blocks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pack_saved, "_BLOCK_BYTES", blocks)
    base = llama(tied=tied)
    folder = save(tmp_path / "a", base, changed, **config)
    check_as_peft(folder, base, layout_of(tied=tied), served_layers)


def test_all_of_it_is_one_adapter_of_as_many_rows_as_differ(tmp_path: Path) -> None:
    base, layout = llama(tied=False), layout_of(tied=False)
    folder = save(tmp_path / "a", base, {"embed_tokens": list(range(20))}, use_dora=True)
    packed = pack(folder, base, layout)
    assert (packed.rank, packed.rows, packed.affine) == (20, 22, True)
    parts = [part for layer in packed.layers for part in (layer.a, *layer.b, *layer.outputs)]
    assert packed.nbytes == packed.slab.nbytes == sum(part.nbytes for part in parts)
    plan = inspect(tmp_path, "a", layout, LIMIT).plan
    assert plan.rank == 4
    assert [w for w in plan.warnings if "at most 64 of its rows may differ" in w and EMBEDDING in w]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_training(dtype: torch.dtype, tmp_path: Path) -> None:
    """Files in half precision of a float32 base model, and the other way round."""
    base, layout = llama(tied=False), layout_of(tied=False)
    folder = save(tmp_path / "a", base, {"embed_tokens": [1, 2], "lm_head": [3]}, dtype)
    packed = pack(folder, base, layout)
    tokens = {
        layer.layer: layer.rank
        for layer in packed.layers
        if layout.layers[layer.layer].kind is not Kind.LINEAR
    }
    assert sorted(tokens.values()) == [1, 2]
    name = str(dtype).removeprefix("torch.")
    folder = save(tmp_path / "b", base, {"embed_tokens": [1, 2], "lm_head": [3]})
    rounded = replace(layout, dtype=name)
    packed = load(
        tmp_path, "b", rounded, None, LIMIT, base=WeightsModel(copy.deepcopy(base).to(dtype), rounded)
    )
    assert tokens == {layer.layer: layer.rank for layer in packed.layers if layer.layer in tokens}


def test_too_many_rows_are_counted(tmp_path: Path) -> None:
    base, layout = llama(tied=False), replace(layout_of(tied=False), max_rank=16)
    error = refusal(save(tmp_path / "a", base, {"embed_tokens": list(range(20))}), base, layout)
    assert error.code is Code.RANK_TOO_LARGE
    assert "model.embed_tokens.weight" in str(error)
    assert "at most 16 rows" in str(error)
    assert "20 of 64 rows differ" in str(error)
    assert "--max-lora-rank 32" in str(error)


def test_more_rows_than_any_server_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_plugin.layout.MAX_RANKS", (8, 16, 32))
    base, layout = llama(tied=False), replace(layout_of(tied=False), max_rank=16)
    error = refusal(save(tmp_path / "a", base, {"lm_head": list(range(64))}), base, layout)
    assert "64 of 64 rows differ" in str(error)
    assert "trainable_token_indices" in str(error)


def test_other_modules_must_be_the_base_model_s(tmp_path: Path) -> None:
    base, layout = llama(tied=False), layout_of(tied=False)
    same = save(tmp_path / "same", base, {"norm": [], "embed_tokens": ROWS})
    check_as_peft(same, base, layout, {"embed_tokens"})
    error = refusal(save(tmp_path / "other", base, {"norm": [4]}), base, layout)
    assert error.code is Code.FEATURE_UNSUPPORTED
    assert "'model.norm.weight'" in str(error)
    assert "1 of 32" in str(error)


def test_every_module_of_the_names_must_be_there(tmp_path: Path) -> None:
    """PEFT takes "norm" for the end of "input_layernorm", too, and loads no adapter that lacks one."""
    base, layout = llama(tied=False), layout_of(tied=False)
    folder = save(tmp_path / "a", base, {"norm": [], "lm_head": [1]})
    missing = "model.layers.1.input_layernorm.weight"
    edit_tensors(folder, lambda old: {k: v for k, v in old.items() if not k.endswith(missing)})
    with pytest.raises(KeyError, match=missing):
        PeftModel.from_pretrained(copy.deepcopy(base), str(folder))
    error = refusal(folder, base, layout)
    assert error.code is Code.TENSOR_PAIR_MISSING
    assert missing in str(error)


def resize(extra: int) -> Any:
    return lambda old: old | {EMBEDDING: torch.cat([old[EMBEDDING], torch.zeros(extra, HIDDEN)])}


@pytest.mark.parametrize(
    ("edit", "code", "words"),
    [
        (resize(3), Code.FEATURE_UNSUPPORTED, ("resized vocabulary", "64 tokens", "67 tokens")),
        (lambda old: old | {EMBEDDING: old[EMBEDDING][:, :16]}, Code.SHAPE_MISMATCH, ("[64, 16]",)),
        (lambda old: {k: old[k] for k in old if k != EMBEDDING}, Code.TENSOR_PAIR_MISSING, ("embed_tokens",)),
        (lambda old: old | {EMBEDDING: old[EMBEDDING] / 0}, Code.NOT_FINITE, (EMBEDDING,)),
        (lambda old: old | {EMBEDDING: old[EMBEDDING] * 1e6}, Code.NOT_FINITE, (EMBEDDING, "overflow")),
        (lambda old: old | {SCORE: torch.ones(2, HIDDEN)}, Code.FEATURE_UNSUPPORTED, ("score.weight",)),
        (lambda old: old | {HEAD: old[EMBEDDING][0]}, Code.SHAPE_MISMATCH, ("[64, 32]", "[32]")),
        (lambda old: old | TWICE, Code.FEATURE_UNSUPPORTED, ("lm_head", "in another way")),
    ],
)
def test_what_cannot_be_right(edit: Any, code: Code, words: tuple[str, ...], tmp_path: Path) -> None:
    base = llama(tied=False)
    folder = save(tmp_path / "a", base, {"embed_tokens": [1]})
    edit_tensors(folder, edit)
    error = refusal(folder, base, layout_of(tied=False))
    assert error.code is code, str(error)
    assert all(word in str(error) for word in words), str(error)


def test_whole_weights_that_the_config_does_not_name(tmp_path: Path) -> None:
    base = llama(tied=False)
    folder = save(tmp_path / "a", base, {"embed_tokens": [1]})
    edit_config(folder, modules_to_save=None)
    error = refusal(folder, base, layout_of(tied=False))
    assert error.code is Code.FEATURE_UNSUPPORTED
    assert EMBEDDING in str(error)


def test_a_part_of_a_composition_is_scaled(tmp_path: Path) -> None:
    base, layout = llama(tied=False), llama_layout()
    save(tmp_path / "a", base, {"embed_tokens": [3]})

    def row(factor: float) -> Tensor:
        packed = load(tmp_path, "a", layout, None, LIMIT, base=WeightsModel(base, layout), factor=factor)
        return packed.layers[0].b[0][0]

    torch.testing.assert_close(row(0.5), row(1.0) / 2)
