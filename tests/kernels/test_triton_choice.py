"""Which kernels a batch gets, and how the op reaches them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from triton_layers import Step, Subject, assert_close, expand, shrink
from triton_strict import interpreted

from lora_plugin.kernels import Batch, batch, choice, op, register, unregister_all
from lora_plugin.kernels.triton import tables
from lora_plugin.kernels.triton.layer import DeviceLayer


def test_auto_takes_triton_on_a_gpu_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.choose("auto", "cuda") == "triton"
    assert choice.choose("torch", "cuda") == "torch"
    assert choice.choose("auto", "cpu") in ("native", "torch")
    monkeypatch.setattr(choice, "_import_triton", lambda: False)
    assert choice.choose("auto", "cuda") == "torch"


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_triton_without_a_gpu_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"'triton' cannot be had on {device}; choose one of: auto, .*torch"):
        choice.choose("triton", device)
    with pytest.raises(ValueError, match="cannot be had"):
        Batch(8, 8, 8, 64, "cpu", torch.float32, kernels="triton")


def test_an_unknown_architecture_takes_the_general_table_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[object, ...]] = []
    monkeypatch.setattr(tables.logger, "warning", lambda *words: said.append(words))
    tables.key_of.cache_clear()
    assert [tables.key_of(name) for name in ("sm_120", "sm_90", "sm_120")] == ["other", "sm_90", "other"]
    assert [words[1] for words in said] == ["sm_120"]
    assert tables.choose_shape("other", 16, torch.bfloat16).shrink.extent == 128


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Subject, Batch, int]]:
    """A layer whose batch believes that its device has Triton."""
    monkeypatch.setattr(batch, "choose", lambda *_: "triton")
    monkeypatch.setattr(DeviceLayer, "warm_up", lambda _: None)
    monkeypatch.setattr("lora_plugin.kernels.triton.layer.architecture", lambda _: "sm_90")
    subject = Subject((8, 24), 64, (48,), torch.bfloat16)
    device_batch = Batch(32, 8, 2, subject.weights.rows, "cpu", torch.bfloat16, max_rank=24)
    yield subject, device_batch, register(subject.weights, device_batch)
    unregister_all()


def test_the_op_launches_for_any_step(registered: tuple[Subject, Batch, int]) -> None:
    subject, device_batch, handle = registered
    (y, x), counts = subject.inputs(7), [3, 2, 2]
    for adapters in ([1, -1, 0], [-1, -1, -1]):
        expected = subject.expected(y, x, Step(adapters, counts))
        device_batch.update(np.array(adapters), np.array(counts), subject.first_rows, subject.ranks)
        with interpreted(shrink, expand) as builder:
            builder.allow(*subject.weights.b)
            op._apply_on_device(y, x, handle)
        assert len(builder.launches) == 2
        assert device_batch.is_empty == (max(adapters) < 0)
        assert_close(y, expected)


def test_warm_up_compiles_every_cut_and_changes_nothing() -> None:
    subject = Subject((8, 24), 64, (48,), torch.bfloat16)
    subject.set_step(Step((0, 1), (9, 9)))
    subject.tiles.scratch.planes.fill_(torch.nan)
    with interpreted(shrink, expand) as builder:
        builder.allow(*subject.weights.b)
        subject.layer.warm_up()
    assert {launch[-1]["ROWS"] for launch in builder.launches} == {1, 16, 64}
    assert subject.tiles.scratch.planes.isnan().all()
