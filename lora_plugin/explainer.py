"""What is asked of catalog, engines and workers to explain an adapter."""

from __future__ import annotations

from lora_plugin.admin.explanation import ExplanationView
from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.entry import Adapter
from lora_plugin.explanation import (
    Facts,
    alias_finding,
    engine_facts,
    findings,
    folder_finding,
    layers_view,
)
from lora_plugin.layout import ModelLayout
from lora_plugin.readiness.engines import Engines
from lora_plugin.routing.composer import Composer
from lora_plugin.routing.files import RoutingFiles
from lora_plugin.views import Residents, alias_targets, part_targets


class Explainer:
    """Gathers the facts that `explanation.py` judges.

    Args:
        catalog: every adapter.
        engines: the line to the engines.
        files: aliases and compositions.
        composer: knows the compositions that are served.
        layout: the model's.
    """

    def __init__(
        self, catalog: Catalog, engines: Engines, files: RoutingFiles, composer: Composer, layout: ModelLayout
    ) -> None:
        self._catalog = catalog
        self._engines = engines
        self._files = files
        self._composer = composer
        self._layout = layout

    async def explain(self, name: str) -> ExplanationView:
        """Raises AdapterNotFound for a name that means nothing."""
        alias = self._files.aliases.value.get(name)
        targets = () if alias is None else alias_targets(alias)
        if alias is not None and self._catalog.get(name) is None:
            return ExplanationView(name=name, stands_for=targets, findings=(alias_finding(name, targets),))
        parts = None if alias else self._files.compositions.value.get(name)
        composed = self._composer.known(name)
        adapter = None if parts or composed else self._catalog.known(name)
        version = composed if adapter is None else adapter.version
        snapshots = await self._engines.snapshots()
        reports = [] if version is None else await self._engines.explain(version.id)
        facts = Facts(
            None if adapter is None else Residents.of(snapshots).view(adapter),
            layers_view(self._layout, reports[0]["layers"] if reports else None),
            [
                engine_facts(snapshot, str(version.id), report)
                for snapshot, report in zip(snapshots, reports, strict=False)
                if version is not None
            ],
            [other.name for other in self._catalog.list() if _same_content(other, adapter)],
        )
        return ExplanationView(
            name=name,
            stands_for=targets or part_targets(parts or ()),
            adapter=facts.adapter,
            layers=facts.layers,
            engines=tuple(facts.engines),
            findings=(*([folder_finding(name, targets)] if targets else ()), *findings(name, facts)),
        )


def _same_content(other: Adapter, adapter: Adapter | None) -> bool:
    if adapter is None or adapter.version is None or other.version is None or other.name == adapter.name:
        return False
    return other.version.digest == adapter.version.digest
