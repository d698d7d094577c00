"""The dashboard and the alert rules use what is exported, and nothing else."""

from __future__ import annotations

import json
import re

import yaml
from documents import DOCS, ROOT, section

from lora_plugin.admin.models import PoolView
from lora_plugin.errors import Code
from lora_plugin.extensions.metrics import export_plugins
from lora_plugin.hooks.manager import HookManager
from lora_plugin.metrics import Metrics, Snapshot
from lora_plugin.pool.journal import Cause

FOLDER = ROOT / "examples/observability"


def exported() -> set[str]:
    metrics = Metrics()
    export_plugins(HookManager(), metrics.registry)
    metrics._snapshots.snapshot = Snapshot([], PoolView(engines=()))
    families = {family.name: family for family in metrics.registry.collect()}
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {name + suffix for name, family in families.items() for suffix in suffixes[family.type]}


def used(text: str) -> set[str]:
    return set(re.findall(r"\blora_plugin_\w+", text))


def alerts() -> list[dict[str, str]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, object]]:
    return list(json.loads((FOLDER / "dashboard.json").read_text())["panels"])


def test_alerts_use_metrics_that_exist() -> None:
    for rule in alerts():
        assert used(rule["expr"]), rule["alert"]
        assert used(rule["expr"]) <= exported(), rule["alert"]
        assert {"alert", "expr", "for", "labels", "annotations"} == set(rule)
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())


def test_the_labels_of_alerts_exist() -> None:
    text = (FOLDER / "alerts.yaml").read_text()
    assert set(re.findall(r'reason="([\w-]+)"', text)) <= set(Cause)
    assert set(re.findall(r'code!?="([\w-]+)"', text)) <= set(Code)


def test_the_dashboard_shows_every_metric() -> None:
    shown = used(json.dumps(panels()))
    assert shown <= exported()
    families = {re.sub("_(total|bucket|sum|count)$", "", name) for name in exported()}
    assert {re.sub("_(total|bucket|sum|count)$", "", name) for name in shown} == families


def test_panels_have_places_of_their_own() -> None:
    places = [panel["gridPos"] for panel in panels()]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)  # type: ignore[index]
    assert len({panel["title"] for panel in panels()}) == len(places)


def test_expressions_are_balanced() -> None:
    """No parser of PromQL is at hand: brackets and quotes at least."""
    expressions = [rule["expr"] for rule in alerts()]
    expressions += [target["expr"] for panel in panels() for target in panel["targets"]]  # type: ignore[attr-defined]
    for expression in expressions:
        bare = re.sub(r'"[^"]*"', "", expression)
        assert '"' not in bare
        for opening, closing in ("()", "{}", "[]"):
            assert bare.count(opening) == bare.count(closing), expression


def test_every_metric_is_in_the_document_with_its_suffix() -> None:
    documented = used(section(DOCS / "admin.md", "Metrics")) - {"lora_plugin_"}
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in exported()}
    assert documented == names
