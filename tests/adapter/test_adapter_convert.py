"""What `convert` writes is what PEFT reads of the source; what cannot be converted leaves nothing behind."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import LIMIT, base_model, deltas, edit_tensors, packed_deltas, rename, shard, train
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from lora_plugin.adapter.convert import Converted, convert
from lora_plugin.adapter.load import load
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import ModelLayout

WEIGHTS = "adapter_model.safetensors"


def by_peft(folder: Path) -> dict[str, Tensor]:
    """What PEFT adds to each module when it loads the folder."""
    return deltas(PeftModel.from_pretrained(copy.deepcopy(base_model()), str(folder)))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, delta in expected.items():
        torch.testing.assert_close(found[name], delta, rtol=rtol, atol=rtol * float(delta.abs().max()))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def refused(source: Path, **options: Any) -> AdapterRejected:
    target = source.parent / "new"
    with pytest.raises(AdapterRejected) as caught:
        convert(source, target, **options)
    assert [path.name for path in source.parent.iterdir() if "new" in path.name] == []
    return caught.value


def wrapped(key: str) -> str:
    """As a compiled, sharded model with checkpointing names it."""
    key = key.removeprefix("base_model.model.").replace(".mlp.", "._checkpoint_wrapped_module.mlp.")
    key = key.replace(".self_attn.", "._fsdp_wrapped_module.self_attn.")
    return f"module._orig_mod.{key}".replace(".weight", ".default.weight")


@pytest.mark.parametrize("change", [pickled, shard, lambda folder: rename(folder, wrapped)])
def test_the_same_adapter_comes_out(change: Any, tmp_path: Path, layout: ModelLayout) -> None:
    source = tmp_path / "a"
    model = train(target_modules="all-linear", use_rslora=True, rank_pattern={"v_proj": 3})
    model.save_pretrained(str(source))
    change(source)
    done = convert(source, tmp_path / "new")
    files = sorted((tmp_path / "new").iterdir())
    assert [path.name for path in files] == ["adapter_config.json", WEIGHTS]
    assert len({path.stat().st_mode for path in files}) == 1
    assert isinstance(done, Converted)
    assert done.changes
    assert_same(by_peft(tmp_path / "new"), deltas(model))
    assert_same(packed_deltas(load(tmp_path, "new", layout, None, LIMIT), layout), deltas(model), 1e-5)


def test_embeddings_keep_their_names(tmp_path: Path) -> None:
    model = train(target_modules=["embed_tokens", "lm_head", "k_proj"])
    model.save_pretrained(str(tmp_path / "a"))
    before = load_file(tmp_path / "a" / WEIGHTS)
    assert convert(tmp_path / "a", tmp_path / "new").changes == ()
    assert load_file(tmp_path / "new" / WEIGHTS).keys() == before.keys()
    assert_same(by_peft(tmp_path / "new"), deltas(model))


def test_a_cast_changes_the_dtype_only(tmp_path: Path) -> None:
    train().save_pretrained(str(tmp_path / "a"))
    convert(tmp_path / "a", tmp_path / "new", dtype="bfloat16")
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("a", "new"))
    assert all(torch.equal(after[key], tensor.bfloat16()) for key, tensor in before.items())
    edit_tensors(tmp_path / "a", lambda tensors: {key: tensor + 1e6 for key, tensor in tensors.items()})
    (tmp_path / "new").rename(tmp_path / "old")
    assert refused(tmp_path / "a", dtype="float16").code == Code.NOT_FINITE


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("patterns", [{}, {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"q_proj": 5}}])
def test_an_adapter_of_a_changed_base_becomes_a_plain_one(
    rslora: bool, patterns: dict[str, Any], tmp_path: Path
) -> None:
    original = copy.deepcopy(base_model())
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="pissa", use_rslora=rslora, **patterns
    )
    model = get_peft_model(copy.deepcopy(original), config)
    model.save_pretrained(str(tmp_path / "initial"))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(str(tmp_path / "a"))
    assert "convert --initial" in str(refused(tmp_path / "a").reason.hint)
    convert(tmp_path / "a", tmp_path / "new", initial=tmp_path / "initial")
    merged, weights = model.merge_and_unload().state_dict(), original.state_dict()
    for name, delta in by_peft(tmp_path / "new").items():
        expected = merged[f"{name}.weight"] - weights[f"{name}.weight"]
        torch.testing.assert_close(delta, expected, rtol=1e-3, atol=1e-5)
    assert json.loads((tmp_path / "new" / "adapter_config.json").read_text())["r"] == 8


def test_the_wrong_initial_adapter(folder: Path) -> None:
    train(r=4).save_pretrained(str(folder.parent / "initial"))
    assert refused(folder, initial=folder.parent / "initial").code == Code.WEIGHTS_INVALID


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch attacked",))


@pytest.mark.parametrize("content", [{"a.lora_A.weight": Attack()}, [torch.ones(1)], {"a": "text"}])
def test_a_pickle_of_anything_else(content: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / WEIGHTS).unlink()
    torch.save(content, folder / "adapter_model.bin")
    assert refused(folder).code in (Code.WEIGHTS_FORMAT, Code.WEIGHTS_INVALID)
    assert not (folder / "attacked").exists()


@pytest.mark.parametrize("raw", [b"", b"junk", b"PK\x03\x04broken"])
def test_a_broken_pickle(raw: bytes, folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(raw)
    assert refused(folder).code == Code.WEIGHTS_FORMAT


def test_two_adapters_are_not_made_one(folder: Path) -> None:
    edit_tensors(
        folder,
        lambda old: {k.replace(".weight", f".{n}.weight"): t.clone() for k, t in old.items() for n in "ab"},
    )
    assert refused(folder).code == Code.WEIGHTS_INVALID


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.write_text("mine")
    with pytest.raises(FileExistsError):
        convert(folder, target)
    assert target.read_text() == "mine"


def test_a_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lora_plugin.adapter.convert.save_file", full)
    with pytest.raises(OSError, match="No space"):
        convert(folder, folder.parent / "new")
    assert [path.name for path in folder.parent.iterdir()] == ["good"]
