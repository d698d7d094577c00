"""Which adapters have requests, in all engines: what gateways read of the host's metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lora_plugin.hosts.vllm.link import EngineLink

NAME: Final = "vllm:lora_requests_info"
_TIMEOUT_SECONDS: Final = 0.5
_LABELS: Final = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


@dataclass(frozen=True, slots=True)
class AdapterRequests:
    """Names of adapters with requests, over all engines.

    Attributes:
        running: in a step now.
        waiting: in an engine's queue, or being loaded.
        max_loras: the slabs of an engine.
    """

    running: frozenset[str]
    waiting: frozenset[str]
    max_loras: int

    @classmethod
    def of(cls, engines: Iterable[dict[str, Any]]) -> AdapterRequests:
        engines = list(engines)
        return cls(
            frozenset(name for engine in engines for name in engine["running"]),
            frozenset(name for engine in engines for name in engine["waiting"]),
            max(engine["slabs"] for engine in engines),
        )


class Requests:
    """What the engines last said.

    Args:
        link: the line to them.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._known: AdapterRequests | None = None

    async def now(self) -> AdapterRequests | None:
        """The present ones; those known where an engine takes its time (a long step); None before any."""
        # A scrape must not fail for one figure; the host's own tell that an engine is dead.
        with contextlib.suppress(Exception):
            engines = await asyncio.wait_for(self._link.adapter_requests(), _TIMEOUT_SECONDS)
            self._known = AdapterRequests.of(engines)
        return self._known


class Corrected(Collector):
    """What the host exports, but the truth in place of its own gauge.

    That one knows only the requests of one API server, keeps a series for every set of names there ever was,
    and adds the time stamps of several servers up.

    Args:
        host: the host's registry.
        requests: what stands in the gauge's place; None where it is not known: nothing does.
    """

    def __init__(self, host: Collector, requests: AdapterRequests | None) -> None:
        self._host = host
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        yield from (metric for metric in self._host.collect() if metric.name != NAME)
        if self._requests is not None:
            yield _info(self._requests)


def _info(requests: AdapterRequests) -> Metric:
    info = GaugeMetricFamily(NAME, "Running stats on lora requests.", labels=_LABELS)
    names = (",".join(sorted(names)) for names in (requests.waiting, requests.running))
    info.add_metric([str(requests.max_loras), *names], time.time())
    return info
