"""What the pool knows of one adapter version."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from lora_plugin.pool.extents import Extent


class Host(StrEnum):
    """Where the workers' host copy stands."""

    ABSENT = "absent"
    """not asked for, or evicted"""
    WAITING = "waiting"
    """asked for, no room at the moment; ask again"""
    STAGING = "staging"
    """the workers are reading it"""
    READY = "ready"
    """packed in every worker's host cache: can be loaded"""


@dataclass(slots=True, eq=False)
class Entry:
    """One adapter version; written by the pool only.

    Attributes:
        adapter_id: the host's `lora_int_id`.
        name: the adapter's name.
        digest: its content.
        path: the folder, for staging it (again).
        nbytes: bytes of the host copies of all workers together.
        rows: arena rows, a multiple of the granule; 0 until staged.
        host: where the host copy stands.
        extent: its place on the device, None when it is not there.
        ahead: brought there before the request that it is for.
        pinned: stays on the device, or gets there as soon as there is room; only ready adapters are.
        retired: leaves when the last reference and lease are gone.
        hold_until: till then it is kept for the request that it was staged for (pool's clock, seconds).
        leases: API server -> till when it is kept for the responses there.
        abort_at: when requests that still use it are to be ended.
        last_used: orders uses; larger is later.
        uses: requests since its host copy was made.
        load_seconds: how long that took.
        worth: of the host copy, by the cache's policy.
        used_at: time of the last use, in seconds of the pool's clock.
        loads, evictions, hits: counted since the version became known.
    """

    adapter_id: int
    name: str
    digest: str
    path: str
    nbytes: int
    rows: int = 0
    host: Host = Host.ABSENT
    extent: Extent | None = None
    ahead: bool = False
    pinned: bool = False
    retired: bool = False
    hold_until: float = float("-inf")
    leases: dict[str, float] = field(default_factory=dict)
    abort_at: float = float("inf")
    last_used: int = 0
    uses: int = 0
    load_seconds: float = 0.0
    worth: float = 0.0
    used_at: float = 0.0
    loads: int = 0
    evictions: int = 0
    hits: int = 0
