"""A classifier's head: with the packed adapter it is PEFT's, and what cannot be one is refused by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_samples import HIDDEN, LIMIT, edit_tensors, llama_layout, tiny_config, train
from base_weights import WeightsModel
from torch import nn
from transformers import LlamaForSequenceClassification

from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import Kind, Layer, ModelLayout, Slice

LABELS = 5
SAVED = "base_model.model.score.weight"


def classifier() -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = LlamaForSequenceClassification(tiny_config(num_labels=LABELS))
    return model


def classifier_layout(**options: Any) -> ModelLayout:
    layout = llama_layout(**options)
    head = Layer("score", Kind.CLASSIFIER, (Slice("score", HIDDEN, LABELS, (0, HIDDEN), (0, LABELS)),))
    layers = [each for each in layout.layers if each.kind is not Kind.LM_HEAD]
    return replace(layout, layers=(*layers, head))


@pytest.fixture
def base() -> nn.Module:
    return classifier()


@pytest.fixture
def trained(base: nn.Module, tmp_path: Path) -> nn.Module:
    """An adapter that PEFT saved with its head, into the folder `a`."""
    model = train(copy.deepcopy(base), r=2, task_type="SEQ_CLS")
    model.get_submodule("base_model.model.score.modules_to_save.default").weight.data.normal_()
    model.save_pretrained(str(tmp_path / "a"))
    return model


def refusal(root: Path, layout: ModelLayout) -> tuple[Code, str]:
    with pytest.raises(AdapterRejected) as caught:
        inspect(root, "a", layout, LIMIT)
    return caught.value.code, str(caught.value)


def test_the_head_is_peft_s(base: nn.Module, trained: nn.Module, tmp_path: Path) -> None:
    layout = classifier_layout()
    packed = load(tmp_path, "a", layout, None, LIMIT, base=WeightsModel(base, layout))
    head = next(layer for layer in packed.layers if layout.layers[layer.layer].kind is Kind.CLASSIFIER)
    assert (head.rank, packed.rank, packed.relative) == (LABELS, LABELS, True)
    x = torch.randn(7, HIDDEN)
    served = x @ base.get_submodule("score").weight.T + x @ head.a[:, 0].T @ head.b[0]
    expected = x @ trained.get_submodule("base_model.model.score.modules_to_save.default").weight.T
    torch.testing.assert_close(served, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("trained")
def test_more_labels_than_rows(base: nn.Module, tmp_path: Path) -> None:
    layout = classifier_layout(max_rank=4)
    with pytest.raises(AdapterRejected, match="--max-lora-rank 8") as caught:
        load(tmp_path, "a", layout, None, LIMIT, base=WeightsModel(base, layout))
    assert caught.value.code is Code.RANK_TOO_LARGE


@pytest.mark.usefixtures("trained")
def test_what_the_headers_tell(tmp_path: Path) -> None:
    edit_tensors(tmp_path / "a", lambda tensors: {**tensors, SAVED: torch.zeros(3, HIDDEN)})
    code, message = refusal(tmp_path, classifier_layout())
    assert code is Code.SHAPE_MISMATCH
    assert SAVED in message
    edit_tensors(tmp_path / "a", lambda tensors: {k: t for k, t in tensors.items() if k != SAVED})
    assert refusal(tmp_path, classifier_layout())[0] is Code.TENSOR_PAIR_MISSING
