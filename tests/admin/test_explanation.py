"""What is said about an adapter follows from the facts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from memory_operations import listed, rejected

from lora_plugin.admin.explanation import EngineFactsView, Level, Question, ShareView
from lora_plugin.explanation import Facts, engine_facts, findings, layers_view
from lora_plugin.layout import Kind, Layer, ModelLayout, Slice
from lora_plugin.worker.recent import RecentBatches

NAMES = ("q", "k", "v")
LAYOUT = ModelLayout(
    tuple(Layer(name, Kind.LINEAR, (Slice(name, 4, 4, (0, 4), (0, 4)),)) for name in NAMES), "float32", 8, {}
)
READY = EngineFactsView(host="ready", first_row=8, rows=8, loads=1)
STEP = (ShareView(adapter="base", requests=1, rows=5), ShareView(adapter="sql", requests=2, rows=7))


def said(question: Question, **changes: Any) -> list[tuple[Level, str]]:
    facts = {
        "adapter": listed("sql"),
        "layers": layers_view(LAYOUT, [[0, 8, True], [2, 4, True]]),
        "engines": [READY],
        **changes,
    }
    return [(f.level, f.text) for f in findings("sql", Facts(**facts)) if f.question is question]


def test_layers_are_named() -> None:
    view = layers_view(LAYOUT, [[0, 8, True], [1, 0, False], [2, 4, False]])
    assert view is not None
    assert (view.wrapped, view.changed, view.without_effect) == (3, 2, 1)
    assert (view.unchanged, view.zero) == (("k",), ("v",))
    assert layers_view(LAYOUT, None) is None


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, Level.OK, "changes 2 of 3 layers"),
        ({"adapter": rejected("sql")}, Level.PROBLEM, "rejected, not served: The rank is above"),
        ({"layers": None}, Level.NOTE, "not loaded"),
        ({"layers": layers_view(LAYOUT, [[0, 8, False]])}, Level.PROBLEM, "untrained"),
        ({"layers": layers_view(LAYOUT, [[0, 8, False], [1, 8, True]])}, Level.NOTE, "zero in 1 of its 2"),
        ({"adapter": None}, Level.OK, "changes 2 of 3 layers"),
    ],
)
def test_no_effect(changes: dict[str, Any], level: Level, words: str) -> None:
    first_level, text = said(Question.NO_EFFECT, **changes)[0]
    assert first_level is level
    assert words in text


@pytest.mark.parametrize(
    ("engine", "level", "words"),
    [
        (READY, Level.OK, "rank 16; 1 loads"),
        (READY.model_copy(update={"evictions": 3}), Level.PROBLEM, "3 times"),
        (READY.model_copy(update={"waiting_requests": 2, "longest_wait_seconds": 4.0}), Level.NOTE, "4.0 s"),
        (EngineFactsView(host="absent"), Level.NOTE, "absent"),
    ],
)
def test_slow(engine: EngineFactsView, level: Level, words: str) -> None:
    first_level, text = said(Question.SLOW, engines=[engine])[0]
    assert first_level is level
    assert words in text


def test_alike() -> None:
    assert said(Question.ALIKE, same_content=["copy"])[0] == (
        Level.PROBLEM,
        "it has the same content as copy",
    )
    ((level, text),) = said(Question.ALIKE)
    assert (level, text) == (Level.NOTE, "it had no row in the last 0 steps")
    busy = READY.model_copy(update={"steps": (STEP, STEP, STEP[:1])})
    assert said(Question.ALIKE, engines=[busy]) == [
        (Level.OK, "14 rows of the last 3 steps were its own beside base")
    ]
    alone = READY.model_copy(update={"steps": (STEP[1:],)})
    assert said(Question.ALIKE, engines=[alone]) == [
        (Level.OK, "7 rows of the last 1 steps were its own, nobody else's beside them")
    ]


def test_an_engines_facts() -> None:
    copy = {
        "id": "7",
        "name": "sql",
        "host": "ready",
        "loads": 2,
        "evictions": 1,
        "hits": 3,
        "load_seconds": 0.5,
    }
    snapshot = {"adapters": [copy], "waiting": {"requests": 1, "longest_seconds": 2.5}}
    steps = [[{"id": "0", "requests": 1, "rows": 5}, {"id": "7", "requests": 2, "rows": 7}]]
    facts = engine_facts(snapshot, "7", {"extent": [8, 16], "steps": steps})
    assert (facts.host, facts.first_row, facts.rows, facts.evictions) == ("ready", 8, 16, 1)
    assert facts.steps == (STEP,)
    gone = engine_facts(snapshot, "9", {"extent": None, "steps": [[{"id": "9", "requests": 1, "rows": 1}]]})
    assert (gone.host, gone.rows, gone.steps[0][0].adapter) == ("absent", None, "(gone)")


def test_the_last_steps_are_kept() -> None:
    recent = RecentBatches()
    for step in range(40):
        recent.note(np.array([0, 1 << 61, 0, step + 1], np.int64), np.array([1, 20, 3, 4], np.int32))
    steps = recent.to_list()
    assert len(steps) == 32
    assert steps[-1] == [
        {"id": "0", "requests": 2, "rows": 4},
        {"id": "40", "requests": 1, "rows": 4},
        {"id": str(1 << 61), "requests": 1, "rows": 20},
    ]
