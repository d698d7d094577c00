"""What the admin endpoint shows, put together from the catalog and the engines' pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from lora_plugin.admin.models import (
    AdapterView,
    AliasView,
    CompositionView,
    EngineView,
    ExtentView,
    PoolCounters,
    PoolView,
    ReasonView,
    Residency,
    RoutingFileView,
    RoutingView,
    TargetView,
)
from lora_plugin.directory.entry import Adapter
from lora_plugin.hooks import Part
from lora_plugin.routing.aliases import Alias
from lora_plugin.routing.files import RoutingFiles

Snapshot = dict[str, Any]


class Residents:
    """The engines' adapters by id.

    Args:
        engines: for every engine, its pool's adapters, or those of one name.
    """

    def __init__(self, engines: Iterable[Iterable[Mapping[str, Any]]]) -> None:
        self._engines = [{adapter["id"]: adapter for adapter in adapters} for adapters in engines]

    @classmethod
    def of(cls, snapshots: Iterable[Snapshot]) -> Self:
        """From one snapshot of every pool."""
        return cls(snapshot["adapters"] for snapshot in snapshots)

    def view(self, adapter: Adapter) -> AdapterView:
        """An adapter of the catalog, with where its current version is."""
        adapter_id = None if adapter.version is None else str(adapter.version.id)
        copies = [engine[adapter_id] for engine in self._engines if adapter_id in engine]
        ages = [copy["last_used_seconds_ago"] for copy in copies]
        return AdapterView(
            name=adapter.name,
            state=adapter.state,
            reason=None if adapter.reason is None else ReasonView.of(adapter.reason),
            version=None if adapter.version is None else adapter.version.digest,
            id=adapter_id,
            rank=adapter.rank,
            targets=adapter.targets,
            nbytes=adapter.nbytes or 0,
            packed_bytes=adapter.packed_bytes or 0,
            base_model=adapter.base_model,
            warnings=adapter.warnings,
            source=adapter.source,
            pinned=adapter.pinned,
            residency=Residency(
                disk=True,
                host=sum(copy["host"] == "ready" for copy in copies),
                device=sum(copy["resident"] for copy in copies),
                engines=len(self._engines),
            ),
            requests=sum(copy["refs"] for copy in copies),
            listed_at=adapter.listed_at,
            last_used_seconds_ago=min(ages, default=None),
        )


def alias_targets(alias: Alias) -> tuple[TargetView, ...]:
    """What an alias stands for, with the weights."""
    return tuple(
        TargetView(adapter=target.adapter, version=target.version, weight=weight)
        for target, weight in alias.targets
    )


def part_targets(parts: Sequence[Part]) -> tuple[TargetView, ...]:
    """What a composition is made of, with the factors."""
    return tuple(TargetView(adapter=part.adapter, version=part.version, weight=part.weight) for part in parts)


def routing_view(files: RoutingFiles) -> RoutingView:
    """The names that are no folders."""
    return RoutingView(
        aliases=tuple(
            AliasView(
                name=alias.name, targets=alias_targets(alias), sticky=alias.sticky, fallback=alias.fallback
            )
            for alias in files.aliases.value.values()
        ),
        compositions=tuple(
            CompositionView(name=name, parts=part_targets(parts))
            for name, parts in files.compositions.value.items()
        ),
        files=tuple(
            RoutingFileView(
                name=file.name,
                entries=len(file.value),
                reason=None if file.reason is None else ReasonView.of(file.reason),
            )
            for file in files.all
        ),
    )


def pool_view(snapshots: Sequence[Snapshot]) -> PoolView:
    """Every engine's pool."""
    return PoolView(engines=tuple(_engine(snapshot) for snapshot in snapshots))


def _engine(snapshot: Snapshot) -> EngineView:
    extents = tuple(
        ExtentView(
            slab=slab,
            adapter=extent["name"],
            version=extent["version"],
            first_row=extent["first_row"],
            rows=extent["rows"],
            pinned=extent["pinned"],
            requests=extent["refs"],
        )
        for slab, residents in enumerate(snapshot["extents"])
        for extent in residents
    )
    counters = snapshot["counters"]
    return EngineView(
        slabs=snapshot["slabs"],
        slab_rows=snapshot["slab_rows"],
        rows_total=snapshot["rows_total"],
        rows_free=snapshot["rows_free"],
        host_rows=snapshot["host_rows"],
        host_bytes=snapshot["host_bytes"],
        device_bytes=snapshot["device_bytes"],
        host_budget_bytes=snapshot["host_budget"],
        waiting_requests=snapshot["waiting"]["requests"],
        longest_wait_seconds=snapshot["waiting"]["longest_seconds"],
        extents=extents,
        counters=PoolCounters(
            loads=counters["loads"],
            hits=counters["hits"],
            misses=counters["misses"],
            evictions=counters["evictions"],
        ),
    )
