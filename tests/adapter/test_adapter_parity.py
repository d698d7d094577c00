"""What is packed is what PEFT adds to the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import (
    INNER,
    LIMIT,
    FusedLlama,
    deltas,
    edit_tensors,
    llama_layout,
    packed_deltas,
    rename,
    shard,
    train,
)
from peft import PeftModel
from torch import Tensor

from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load, verify
from lora_plugin.layout import ModelLayout

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS = {"model.layers.0.self_attn.q_proj": 3, r"layers\.1\..*v_proj": 12, "o_proj": 5}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "r5": {"r": 5},
    "rslora": {"use_rslora": True, "target_modules": "all-linear"},
    "patterns": {"rank_pattern": PATTERNS, "target_modules": ALL_LINEAR},
    "alphas": {
        "alpha_pattern": {"q_proj": 3, r".*\.1\.self_attn\.v_proj": 64},
        "rank_pattern": {"q_proj": 2},
    },
    "rslora_patterns": {"use_rslora": True, "rank_pattern": PATTERNS, "alpha_pattern": {"v_proj": 2.5}},
    "regex_target": {"target_modules": r".*\.1\.mlp\.(up|down)_proj"},
    "one_layer": {"target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [1]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "k_proj"], "use_rslora": True},
}


def pack(model: PeftModel, root: Path, layout: ModelLayout) -> dict[str, Tensor]:
    model.save_pretrained(str(root / "a"))
    return packed_deltas(load(root, "a", layout, None, LIMIT), layout)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, delta in expected.items():
        torch.testing.assert_close(found[name], delta, rtol=1e-5, atol=1e-6 * float(delta.abs().max()))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_packed_adapter_adds_what_peft_adds(
    config: dict[str, Any], tmp_path: Path, layout: ModelLayout
) -> None:
    model = train(**config)
    assert_same(pack(model, tmp_path, layout), deltas(model))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_stored_dtypes(stored: torch.dtype, tmp_path: Path, layout: ModelLayout) -> None:
    model = train(dtype=stored)
    assert_same(pack(model, tmp_path, layout), deltas(model))


@pytest.mark.parametrize(("dtype", "epsilon"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_serving_dtypes_differ_by_one_rounding_of_each_factor(
    dtype: str, epsilon: float, tmp_path: Path
) -> None:
    model = train(use_rslora=True)
    model.save_pretrained(str(tmp_path / "a"))
    exact = load(tmp_path, "a", llama_layout(), None, LIMIT)
    served = load(tmp_path, "a", llama_layout(dtype=dtype), None, LIMIT)
    assert served.slab.dtype == getattr(torch, dtype)
    assert served.nbytes == exact.nbytes // 2 == served.slab.nbytes
    error = (served.slab.float() - exact.slab).abs()
    assert bool((error <= epsilon * exact.slab.abs()).all())


def test_names_of_packed_layers(tmp_path: Path, layout: ModelLayout) -> None:
    model = train(FusedLlama(), target_modules=["qkv_proj", "gate_up_proj", "o_proj"], r=6)
    found = pack(model, tmp_path, layout)
    for name, delta in deltas(model).items():
        path, _, leaf = name.rpartition(".")
        parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
        cut = torch.cat([found[f"{path}.{part}"] for part in parts.get(leaf, [leaf])])
        torch.testing.assert_close(cut, delta)


@pytest.mark.parametrize("config", [{"target_modules": [*ALL_LINEAR, "embed_tokens", "lm_head"], "r": 7}])
def test_tensor_parallel_shards_make_up_the_whole(config: dict[str, Any], tmp_path: Path) -> None:
    model = train(**config)
    model.save_pretrained(str(tmp_path / "a"))
    shards = [llama_layout(ranks=2, rank=rank) for rank in (0, 1)]
    found = [packed_deltas(load(tmp_path, "a", layout, None, LIMIT), layout) for layout in shards]
    for name, delta in deltas(model).items():
        by_row = name.endswith(("o_proj", "down_proj"))
        torch.testing.assert_close(torch.cat([part[name] for part in found], dim=int(by_row)), delta)


def test_a_shard_of_a_padded_vocabulary_is_filled_with_zeros(tmp_path: Path) -> None:
    layout = llama_layout()
    embed, *rest = layout.layers
    padded = replace(embed, slices=(replace(embed.slices[0], in_shard=(48, 80)),))
    layout = replace(layout, layers=(padded, *rest))
    model = train(target_modules=["embed_tokens"])
    found = pack(model, tmp_path, layout)["model.embed_tokens"]
    expected = deltas(model)["model.embed_tokens"][48:64]
    torch.testing.assert_close(found[:16], expected)
    assert not found[16:].any()


def test_sharded_files_with_an_index(tmp_path: Path, layout: ModelLayout) -> None:
    model = train(target_modules="all-linear")
    model.save_pretrained(str(tmp_path / "a"))
    shard(tmp_path / "a")
    seen = inspect(tmp_path, "a", layout, LIMIT)
    assert len(seen.snapshot.weights) == 2
    packed = load(tmp_path, "a", layout, verify(tmp_path, "a", seen.snapshot), LIMIT)
    assert_same(packed_deltas(packed, layout), deltas(model))


@pytest.mark.parametrize("host", ["model.", "language_model.model.", "model.language_model.", ""])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda key: key,
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.removeprefix("base_model.model.model."),
        lambda key: key.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."),
        lambda key: key.replace("model.model.", "model.model.language_model.", 1),
        lambda key: key.replace("model.model.", "model.language_model.model.", 1),
        lambda key: key.replace("model.model.", "model._orig_mod.model.", 1),
    ],
    ids=["peft", "bare", "inner", "adapter-name", "transformers-5", "transformers-4", "compiled"],
)
def test_prefixes_in_the_file_and_in_the_host(host: str, wrap: Any, tmp_path: Path) -> None:
    model = train(rank_pattern={"q_proj": 3}, target_modules=["q_proj", "down_proj"])
    model.save_pretrained(str(tmp_path / "a"))
    rename(tmp_path / "a", wrap)
    layout = llama_layout(prefix=host)
    found = packed_deltas(load(tmp_path, "a", layout, None, LIMIT), layout)
    assert_same(found, {host + name.removeprefix("model."): d for name, d in deltas(model).items()})


@pytest.mark.parametrize("base", [True, False])
def test_embeddings_of_a_multimodal_host(base: bool, tmp_path: Path) -> None:
    model = train(target_modules=["embed_tokens", "lm_head"])
    model.save_pretrained(str(tmp_path / "a"), save_embedding_layers=base)
    if not base:
        rename(tmp_path / "a", lambda key: key.replace("_A", "_A.mine", 1).replace("_B", "_B.mine", 1))
    layout = llama_layout(prefix="language_model.model.")
    assert len(inspect(tmp_path, "a", layout, LIMIT).warnings) == (2 if base else 0)
    found = packed_deltas(load(tmp_path, "a", layout, None, LIMIT), layout)
    assert_same(found, {f"language_model.{name}": delta for name, delta in deltas(model).items()})


def test_the_slab_holds_the_layers_in_order_and_nothing_else(folder: Path, layout: ModelLayout) -> None:
    packed = load(folder.parent, "good", layout, None, LIMIT)
    parts = [part.flatten() for layer in packed.layers for part in (layer.a, *layer.b)]
    assert torch.equal(torch.cat(parts), packed.slab)
    assert [layer.layer for layer in packed.layers] == [1, 5]
    seen = inspect(folder.parent, "good", layout, LIMIT)
    assert (seen.rank, seen.targets, seen.packed_nbytes) == (8, ("q_proj", "v_proj"), packed.nbytes)


def test_slices_without_a_target_and_rows_beyond_the_rank_are_zero(
    tmp_path: Path, layout: ModelLayout
) -> None:
    train(rank_pattern={"v_proj": 3}).save_pretrained(str(tmp_path / "a"))
    for layer in load(tmp_path, "a", layout, None, LIMIT).layers:
        assert layer.a.shape == (8, 3, 32)
        assert layer.a[:, 0].any(dim=1).all()
        assert not layer.a[:, 1].any()
        assert not layer.b[1].any()
        assert not layer.a[3:, 2].any()
        assert not layer.b[2][3:].any()


def test_a_lower_rank_is_packed_at_its_own_rank(tmp_path: Path, layout: ModelLayout) -> None:
    train(target_modules=["up_proj", "o_proj"], rank_pattern={"o_proj": 2}).save_pretrained(
        str(tmp_path / "a")
    )
    packed = load(tmp_path, "a", layout, None, LIMIT)
    assert packed.rank == 8
    assert [layer.rank for layer in packed.layers] == [2, 8, 2, 8]
    assert packed.layers[1].b[1].shape == (8, INNER)


def test_one_tensor_more_is_not_packed_silently(folder: Path, layout: ModelLayout) -> None:
    edit_tensors(folder, lambda t: t | {"extra.lora_C": torch.zeros(1)})
    with pytest.raises(ValueError, match="tensor-unknown"):
        load(folder.parent, "good", layout, None, LIMIT)
