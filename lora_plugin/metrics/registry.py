"""The registry, and what this process counts itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lora_plugin.distribution import SECONDS
from lora_plugin.errors import Code, LoraPluginError
from lora_plugin.metrics.families import PREFIX, SnapshotCollector
from lora_plugin.metrics.snapshot import Snapshot

logger = logging.getLogger("lora_plugin")

# A busy engine answers between two steps; a scrape waits no longer than this for it.
_MEASURE_SECONDS = 5.0


class Metrics:
    """The registry and what others increment; every method may be called from any thread.

    Attributes:
        registry: separate from prometheus_client's default one.
        staging_seconds: observe the seconds from the first request for a version until it is staged.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.staging_seconds = Histogram(
            f"{PREFIX}_staging_seconds",
            "Seconds that a request waited until its adapter was staged in host memory",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._rejections = Counter(
            f"{PREFIX}_rejections", "Folders refused, by code", ["code"], registry=self.registry
        )
        self._refusals = Counter(
            f"{PREFIX}_refused_requests", "Requests refused, by code", ["code"], registry=self.registry
        )
        self._routing_files = Gauge(
            f"{PREFIX}_routing_file_valid",
            "1 when the present content of a routing file is what is gone by",
            ["file"],
            registry=self.registry,
            multiprocess_mode="min",
        )
        self._snapshots = SnapshotCollector()
        self.registry.register(self._snapshots)

    def count_rejection(self, code: Code) -> None:
        """One folder refused."""
        self._rejections.labels(code.value).inc()

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Around what may refuse a request by an error of the family."""
        try:
            yield
        except LoraPluginError as error:
            self.count_refusal(error.code)
            raise

    def count_refusal(self, code: Code) -> None:
        """One request refused."""
        self._refusals.labels(code.value).inc()

    def note_routing_file(self, name: str, *, valid: bool) -> None:
        """How a routing file stands."""
        self._routing_files.labels(name).set(valid)

    async def refresh(self, measure: Callable[[], Awaitable[Snapshot]]) -> None:
        """Sets what the next scrape shows. Engines that fail leave what this process counts itself."""
        try:
            async with asyncio.timeout(_MEASURE_SECONDS):
                self._snapshots.snapshot = await measure()
        except Exception as error:
            logger.debug("metrics without the engines: %s", error)
            self._snapshots.snapshot = None
