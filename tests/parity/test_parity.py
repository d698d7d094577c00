"""Architecture by feature: the real server's numbers are those of transformers with PEFT, or a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from asking import PROMPTS, Asked, served_value
from features import FEATURES
from server import BASE
from table import FAILS, render

CELLS = [
    pytest.param(name, feature, id=f"{name}-{feature}", marks=() if a.representative else pytest.mark.parity)
    for name, a in ARCHITECTURES.items()
    for feature, f in {BASE: None, **FEATURES}.items()
    if f is None or f.fits(a)
]
Cells = dict[tuple[str, str], str]


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    """What each cell came to; PARITY_TABLE names the page that is written of it."""
    found: Cells = {}
    yield found
    if path := os.environ.get("PARITY_TABLE"):
        Path(path).write_text(render(found))


@pytest.mark.parametrize(("name", "feature"), CELLS)
def test_cell(name: str, feature: str, ask: Callable[[str], Asked], cells: Cells) -> None:
    cells[name, feature] = FAILS
    asked = ask(name)
    cells[name, feature] = check_answers(asked, feature) or check_refusal(asked, feature)


def check_refusal(asked: Asked, feature: str) -> str:
    """It is refused as the architecture says; the code."""
    state = asked.states[feature]
    assert state["state"] == "rejected", state
    code = state["reason"]["code"]
    assert asked.architecture.refused.get(feature) == code, state
    return f"`{code}`"


def check_answers(asked: Asked, feature: str) -> str | None:
    """All answers are right; the largest error, or None for an adapter that is not served."""
    if feature not in asked.answers:
        return None
    tolerance = asked.architecture.tolerance
    errors = []
    for prompt, answer in zip(PROMPTS, asked.answers[feature], strict=True):
        expected = asked.reference(None if feature == BASE else feature, answer, prompt)
        errors.append((served_value(answer) - expected).abs().max().item())
        if feature != BASE:
            # The adapter is seen: the base model says something else.
            other = asked.reference(None, answer, prompt)
            assert (other - expected).abs().max() > 20 * tolerance
    assert max(errors) <= tolerance
    return f"{max(errors):.0e}"
