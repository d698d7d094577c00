"""What is gathered about a name, whatever kind of name it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from catalog_samples import LAYOUT, Bench, write_adapter

from lora_plugin.admin.explanation import ExplanationView, Level
from lora_plugin.errors import AdapterNotFound
from lora_plugin.explainer import Explainer
from lora_plugin.readiness.staging import StageSpec
from lora_plugin.routing.files import RoutingFiles

MIX = StageSpec(99, "a*2+b", "ef" * 32, "", 0)


class Engines:
    """One engine that has everything ready."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    async def snapshots(self) -> list[dict[str, Any]]:
        versions = [(a.version.id, a.name) for a in self.bench.catalog.list() if a.version]
        counters = {"host": "ready", "loads": 1, "evictions": 0, "hits": 2, "load_seconds": 0.1}
        shown = {"resident": True, "refs": 0, "last_used_seconds_ago": 1, **counters}
        copies = [{"id": str(i), "name": name, **shown} for i, name in [*versions, (MIX.id, MIX.name)]]
        return [{"adapters": copies, "waiting": {"requests": 0, "longest_seconds": 0.0}}]

    async def explain(self, adapter_id: int) -> list[dict[str, Any]]:
        return [{"layers": [[0, 4, True]], "extent": [0, 8], "steps": []}]


@pytest.fixture
def explain(tmp_path: Path) -> Any:
    bench = Bench(tmp_path)
    for name, seed in (("a", 0), ("twin", 0), ("b", 1), ("cold", 2)):
        write_adapter(tmp_path / name, seed)
    (tmp_path / "aliases.yaml").write_text("prod: {a: 1, base: 1}\nb: {b: 1, cold: 1}\n")
    (tmp_path / "compositions.yaml").write_text("mix: a*2+b\n")
    bench.settle()
    files = RoutingFiles(tmp_path, ("base-model",), settle_seconds=0.2)
    files.look(at_once=True)
    for name in ("a", "twin", "b"):
        bench.catalog.version_of(name)
    composer: Any = SimpleNamespace(known=lambda name: MIX if name == MIX.name else None)
    engines: Any = Engines(bench)
    explainer = Explainer(bench.catalog, engines, files, composer, LAYOUT)
    return lambda name: asyncio.run(explainer.explain(name))


def problems(view: ExplanationView) -> list[str]:
    return [finding.text for finding in view.findings if finding.level is Level.PROBLEM]


def test_an_adapter(explain: Any) -> None:
    view = explain("a")
    assert (view.adapter.name, view.layers.changed, view.engines[0].rows) == ("a", 1, 8)
    assert problems(view) == ["it has the same content as twin"]
    assert problems(explain("b")) == []


def test_one_that_nobody_asked_for(explain: Any) -> None:
    view = explain("cold")
    assert (view.layers, view.engines) == (None, ())
    assert "not loaded" in view.findings[0].text


def test_other_names(explain: Any) -> None:
    alias = explain("prod")
    assert [target.adapter for target in alias.stands_for] == ["a", None]
    assert "alias of a, the base model" in alias.findings[0].text
    named = explain("mix")
    assert [(part.adapter, part.weight) for part in named.stands_for] == [("a", 2.0), ("b", 1.0)]
    both = explain("b")
    assert [target.adapter for target in both.stands_for] == ["b", "cold"]
    assert "by an alias to b, cold; what follows is about the folder b" in both.findings[0].text
    assert both.layers is not None
    spelled = explain("a*2+b")
    assert (spelled.adapter, spelled.engines[0].host) == (None, "ready")
    with pytest.raises(AdapterNotFound):
        explain("nobody")
