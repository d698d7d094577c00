"""The plugins' own metrics, beside what is counted of the plugins."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from lora_plugin.hooks.manager import HookManager
from lora_plugin.metrics import PREFIX

logger = logging.getLogger("lora_plugin.hooks")

_HOOK = "register_metrics"
_OURS = f"{PREFIX}_"


class PluginCollector(Collector):
    """One plugin's collectors without our own names; where one fails in a scrape, all are missing from it."""

    def __init__(self, plugin: str, registry: CollectorRegistry, hooks: HookManager) -> None:
        self._plugin, self._registry, self._hooks = plugin, registry, hooks

    def describe(self) -> list[Metric]:
        """What the registry compares names by, when this is registered."""
        return self.collect()

    def collect(self) -> list[Metric]:
        try:
            return [metric for metric in self._registry.collect() if not metric.name.startswith(_OURS)]
        except Exception as error:
            self._hooks.failed(self._plugin, _HOOK, error)
            return []


class FailureCollector(Collector):
    """How often hooks failed in this process."""

    def __init__(self, hooks: HookManager) -> None:
        self._hooks = hooks

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{PREFIX}_hook_failures",
            "Exceptions and wrong answers of plugins in this process",
            labels=["plugin", "hook"],
        )
        for (plugin, hook), count in sorted(self._hooks.failures.items()):
            family.add_metric([plugin, hook], count)
        yield family


def export_plugins(hooks: HookManager, into: CollectorRegistry) -> None:
    """Asks every plugin for its collectors; one whose names are taken is left out, and said so."""
    into.register(FailureCollector(hooks))
    for plugin, registry in hooks.register_metrics(CollectorRegistry):
        try:
            into.register(PluginCollector(plugin, registry, hooks))
        except ValueError as error:
            logger.warning("plugin %r: its metrics are left out: %s", plugin, error)
