"""A load as an OpenTelemetry span with child spans for its stages, for the tracer provider of the process.

Without the package opentelemetry-api, or without a provider (the host sets one up), nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.errors import Reason
from lora_plugin.worker.load_times import Stage

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
except ImportError:
    trace = None  # type: ignore[assignment]

_NAME = "lora_plugin.load"


class LoadSpan:
    """One load of one version in one worker; begins when it is made, which is when the load is asked for.

    A span has the adapter's name and version, never its path: a trace leaves the machine.

    Args:
        name: the adapter.
        version: its digest; empty where any content will do.
    """

    def __init__(self, name: str, version: str) -> None:
        self._span = None
        if trace is not None:
            self._tracer = trace.get_tracer("lora_plugin")
            attributes = {"lora.adapter": name, "lora.version": version}
            # A load belongs to no request: several wait for one, and a prefetch has none.
            self._span = self._tracer.start_span(_NAME, context=Context(), attributes=attributes)

    def stage(self, stage: Stage, seconds: float) -> None:
        """A stage that ended now and took so long; also after the load has ended."""
        if trace is None or self._span is None:
            return
        end = time.time_ns()
        parent = trace.set_span_in_context(self._span, Context())
        begin = end - int(seconds * 1e9)
        self._tracer.start_span(f"{_NAME}.{stage}", context=parent, start_time=begin).end(end)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Around the copy to the device; on a GPU it ends when the copy is queued, not when it is done."""
        started = time.perf_counter()
        yield
        self.stage(Stage.DEVICE, time.perf_counter() - started)

    def end(self, reason: Reason | None, packed: PackedAdapter | None) -> None:
        """The version is in host memory, or refused for a reason, of which the span has the code alone."""
        if trace is None or self._span is None:
            return
        self._span.set_attribute("lora.outcome", "ready" if reason is None else str(reason.code))
        if packed is not None:
            self._span.set_attributes({"lora.rank": packed.rank, "lora.bytes": packed.nbytes})
        if reason is not None:
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()
