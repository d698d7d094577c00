"""Architecture by feature: the real server's numbers are those of transformers with PEFT, or a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from asking import MAX_RANK, Asked, served_value
from features import FEATURES
from server import BASE
from table import FAILS, RATIO, read, render

from lora_plugin.cli.validate import validate
from lora_plugin.errors import Code, LoraPluginError
from lora_plugin.model_folder.layout import folder_layout

CELLS = [
    pytest.param(name, feature, id=f"{name}-{feature}", marks=() if a.representative else pytest.mark.parity)
    for name, a in ARCHITECTURES.items()
    for feature, f in {BASE: None, **FEATURES}.items()
    if f is None or f.fits(a)
]
LIMIT = 1 << 30
Cells = dict[tuple[str, str], str]


@pytest.fixture(scope="module")
def found() -> Cells:
    """What each cell came to so far, those of earlier runs that are on the page among them."""
    page = Path(os.environ.get("PARITY_TABLE", "none"))
    return read(page.read_text()) if page.is_file() else {}


@pytest.fixture
def cells(found: Cells) -> Iterator[Cells]:
    """The same; PARITY_TABLE names the page that is written of it."""
    yield found
    if path := os.environ.get("PARITY_TABLE"):
        Path(path).write_text(render(found))


@pytest.mark.parametrize(("name", "feature"), [cell for cell in CELLS if cell.values[1] != BASE])
def test_the_command_says_what_the_server_says(name: str, feature: str, ask: Callable[[str], Asked]) -> None:
    asked = ask(name)
    layout = folder_layout(asked.served, asked.architecture.dtype, MAX_RANK)
    if feature in asked.refusals:
        with pytest.raises(LoraPluginError) as caught:
            validate(asked.adapters[feature], layout, LIMIT, headers_only=False)
        # A tower that the server left out is unknown to it.
        assert caught.value.code in (asked.refusals[feature], Code.FEATURE_UNSUPPORTED)
        return
    facts = validate(asked.adapters[feature], layout, LIMIT, headers_only=False)
    if state := asked.states.get(feature):
        shared = ("rank", "targets", "nbytes", "packed_bytes", "base_model", "warnings")
        assert {key: facts[key] for key in shared} == {key: state[key] for key in shared}


@pytest.mark.parametrize(("name", "feature"), CELLS)
def test_cell(name: str, feature: str, ask: Callable[[str], Asked], cells: Cells) -> None:
    cells[name, feature] = FAILS
    asked = ask(name)
    cells[name, feature] = check_answers(asked, feature) or check_refusal(asked, feature)


def check_refusal(asked: Asked, feature: str) -> str:
    """It is refused as the architecture says; the code."""
    expected = asked.architecture.refused[feature]
    assert asked.refusals[feature] in (expected, None)
    return f"`{expected}`"


def check_answers(asked: Asked, feature: str) -> str | None:
    """All answers are right; the largest error, or None for an adapter that is not served."""
    if feature not in asked.answers:
        return None
    answers, adapter = asked.answers[feature], None if feature == BASE else feature
    expected = asked.reference(adapter, answers)
    tolerance, seen, shown = tolerance_of(asked, adapter, answers, expected)
    errors = [largest(served_value(answer), right) for answer, right in zip(answers, expected, strict=True)]
    if feature != BASE:
        # The adapter is seen: the base model says something else, to every prompt.
        others = asked.reference(None, answers)
        assert min(map(largest, others, expected)) > seen
    assert max(errors) <= tolerance
    return shown(max(errors))


def tolerance_of(
    asked: Asked, adapter: str | None, answers: list[Any], expected: list[torch.Tensor]
) -> tuple[float, float, Callable[[float], str]]:
    """How large an error may be, how large what an adapter changes must be, and how an error is shown."""
    dtype = getattr(torch, asked.architecture.dtype)
    if dtype is torch.float32:
        tolerance = asked.architecture.tolerance
        return tolerance, 5 * tolerance, "{:.0e}".format
    peers = asked.reference(adapter, answers, dtype)
    own = max(largest(peer.float(), right) for peer, right in zip(peers, expected, strict=True))
    return RATIO * own, RATIO * own, lambda error: f"{error:.0e} ({error / own:.1f})"


def largest(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference."""
    return (one - other).abs().max().item()
