"""Prometheus metrics in a registry of our own.

What the catalog and the engines know comes from one snapshot per scrape; the rest is counted as it happens.
"""

from lora_plugin.metrics.export import render
from lora_plugin.metrics.families import PREFIX
from lora_plugin.metrics.registry import Metrics
from lora_plugin.metrics.snapshot import Snapshot

__all__ = ["PREFIX", "Metrics", "Snapshot", "render"]
