"""The exposition. With several API servers, what each counts itself is summed up over all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from lora_plugin.metrics.families import PREFIX

# The host sets it for several API servers; prometheus_client then keeps every counter in a file there.
_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


def render(registry: CollectorRegistry, accept: str = "", *, with_summed: bool = True) -> tuple[bytes, str]:
    """The exposition and its content type.

    Args:
        registry: what is shown.
        accept: the request's Accept header.
        with_summed: whether to show what is summed up over several processes; the host's own does that.
    """
    encode, content_type = choose_encoder(accept)
    return encode(_Shown(registry, with_summed)), content_type


class _Shown(Collector):
    def __init__(self, registry: CollectorRegistry, with_summed: bool) -> None:
        self._registry = registry
        self._with_summed = with_summed

    def collect(self) -> Iterator[Metric]:
        summed = _summed()
        yield from (metric for metric in self._registry.collect() if metric.name not in summed)
        if self._with_summed:
            yield from summed.values()


def _summed() -> dict[str, Metric]:
    if _DIRECTORY not in os.environ:
        return {}
    untyped: Any = MultiProcessCollector
    metrics = untyped(None).collect()
    return {metric.name: metric for metric in metrics if metric.name.startswith(PREFIX)}
