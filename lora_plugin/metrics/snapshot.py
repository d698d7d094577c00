"""What one scrape shows of the catalog and the engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lora_plugin.admin.models import AdapterView, PoolView


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Taken at once.

    Attributes:
        adapters: those of the catalog.
        pool: the engines' pools.
        usage: of each engine, `Usage.to_dict`.
        workers: of each engine's first rank, `WorkerAdapters.measure`.
    """

    adapters: list[AdapterView]
    pool: PoolView
    usage: list[dict[str, Any]] = field(default_factory=list)
    workers: list[dict[str, Any]] = field(default_factory=list)
