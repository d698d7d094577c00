"""How adapters and their extents are shown: plain str, int and dict, fit for RPC and JSON."""

from __future__ import annotations

from typing import Any

from lora_plugin.pool.entry import Entry


def extent_view(entry: Entry, refs: int) -> dict[str, Any]:
    """An adapter on the device. The id is a string: JSON readers lose the low bits of 62-bit numbers."""
    assert entry.extent is not None
    return {
        "id": str(entry.adapter_id),
        "name": entry.name,
        "version": entry.digest[:12],
        "first_row": entry.extent.first_row,
        "rows": entry.extent.rows,
        "pinned": entry.pinned,
        "refs": refs,
    }


def adapter_view(entry: Entry, refs: int, now: float) -> dict[str, Any]:
    """A version the pool knows, wherever it is; `now` in seconds of the pool's clock."""
    return {
        "id": str(entry.adapter_id),
        "name": entry.name,
        "digest": entry.digest,
        "host": str(entry.host),
        "nbytes": entry.nbytes,
        "rows": entry.rows,
        "resident": entry.extent is not None,
        "refs": refs,
        "pinned": entry.pinned,
        "retired": entry.retired,
        "leases": sum(until > now for until in entry.leases.values()),
        "last_used_seconds_ago": int(now - entry.used_at),
        "loads": entry.loads,
        "evictions": entry.evictions,
        "hits": entry.hits,
        "load_seconds": entry.load_seconds,
    }
