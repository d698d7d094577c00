"""The adapter pool: which adapters the workers hold in host memory and on the device.

One per engine, on the engine's thread. It only decides; the workers carry its orders out. A host copy is
what a device copy is made of, and what it is restored from: so an adapter on the device always has its
host copy, and losing that means leaving the device too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lora_plugin.errors import AdapterBusy, AdapterNotFound, Code, Reason, Unavailable
from lora_plugin.pool.copies import Copies
from lora_plugin.pool.device import Device
from lora_plugin.pool.entry import Entry, Host
from lora_plugin.pool.extents import ExtentAllocator, round_up
from lora_plugin.pool.host import HostCache
from lora_plugin.pool.journal import Cause, Journal
from lora_plugin.pool.orders import Orders
from lora_plugin.pool.policies import POLICIES
from lora_plugin.pool.references import References
from lora_plugin.pool.snapshot import adapter_view, extent_view
from lora_plugin.pool.versions import Versions
from lora_plugin.pool.waits import Waits

GRANULE = 8


class AdapterPool:
    """Allocator and residency bookkeeping of one engine; not thread-safe.

    Args:
        slabs: `--max-loras`; as many unpinned adapters always fit in one batch when nothing is pinned.
        slab_rows: the highest rank, rounded up to 8.
        host_budget_bytes: bytes of host memory for packed adapters, over all workers.
        clock: seconds, never going back.
        eviction: which host copies go first, `lru` or `cost`.
        max_wait_seconds: once a request has waited for room on the device longer than this, it is its
            adapter's turn.
    """

    def __init__(
        self,
        slabs: int,
        slab_rows: int,
        host_budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        eviction: str = "lru",
        max_wait_seconds: float = math.inf,
    ) -> None:
        references, self._journal = References(), Journal()
        extents = ExtentAllocator(slabs, round_up(slab_rows, GRANULE), GRANULE)
        self._device = Device(extents, self._journal, references.count)
        self._versions = Versions(references, self._device.in_use, clock)
        self._host = HostCache(host_budget_bytes, POLICIES[eviction]())
        self._copies = Copies(self._versions, self._host, self._device, self._journal)
        self._waits = Waits(max_wait_seconds)

    def want(
        self, adapter_id: int, name: str, digest: str, path: str, nbytes: int, *, served: bool = True
    ) -> bool:
        """Register a version for staging. Idle host copies go for it only once it is staged.

        A retired version that is `served` again stays; one that a late request wants does not.

        True if the workers are to be asked to stage it now, after the orders taken so far: send
        `take_orders()` first. False if they have it, are at it, or there is no room (`Host.WAITING`: ask
        again later).

        Raises:
            AdapterRejected: the id belongs to another name or content (`ID_CLASH`), or the adapter is
                larger than the whole host cache (`HOST_CACHE_FULL`).
        """
        return self._copies.want(adapter_id, name, digest, path, nbytes, served=served)

    def moment(self) -> AbstractContextManager[None]:
        """Around many calls of `want`, and nothing else: that there is no room is found out once for all."""
        return self._host.moment()

    def staged(self, adapter_id: int, rows: int, nbytes: int, seconds: float = 0.0) -> bool:
        """Every worker has packed it, in `seconds`: `rows` is its rank, `nbytes` its size over all workers.

        Idle host copies leave for it.

        False if it cannot be kept: nobody wants it any more, or it became larger than the room there is
        (`Host.WAITING`). The workers are then told to forget it.

        Raises:
            AdapterRejected: it is larger than the host cache, or its rank than a slab (`RANK_TOO_LARGE`);
                forgotten as by `failed`.
        """
        return self._copies.staged(adapter_id, rows, nbytes, seconds)

    def failed(self, adapter_id: int, reason: Reason) -> None:
        """Some worker could not stage it: the others forget it, and so does the pool (`get` returns None)."""
        self._copies.failed(adapter_id, reason)

    def hold(self, adapter_id: int, seconds: float) -> bool:
        """Keep a ready version until its request arrives, for so long at most; False if it is not ready.

        The first must follow `staged` at once: until then another adapter may take its room.
        """
        entry = self._versions.get(adapter_id)
        if entry is None or entry.host is not Host.READY:
            return False
        entry.hold_until = max(entry.hold_until, self._versions.clock() + seconds)
        self._versions.touch(entry)
        self._host.touch(entry)
        return True

    def place_ahead(self, adapter_id: int) -> None:
        """A request is on its way to a version that is on hold: bring it to the device now, if there is room.

        Nothing that is used or held goes for it, nor anything in the place of that. Without room, not ready,
        or while other requests wait for room, who would have it dropped again: `try_admit` sees to it.
        """
        entry = self._versions.get(adapter_id)
        if entry is not None and entry.host is Host.READY and not self._waits:
            self._device.place_ahead(entry, self._versions.busy)

    def lease(self, client: str, adapter_id: int, seconds: float) -> bool:
        """Keep a ready version for an API server's responses, for so long from now on; 0: no longer.

        Unlike `hold`, it outlasts the arrival of requests, and what else the other API servers say.
        False if the version is not ready (any more).
        """
        entry = self._versions.get(adapter_id)
        if entry is None:
            return False
        now, ready = self._versions.clock(), entry.host is Host.READY
        entry.leases = {c: until for c, until in entry.leases.items() if until > now}
        if seconds <= 0:
            entry.leases.pop(client, None)
        elif ready:
            entry.leases[client] = now + seconds
        self._copies.sweep()
        return ready

    def drain(self, name: str, seconds: float) -> None:
        """Retire every version of the adapter; what still uses one after so long is to be ended."""
        for entry in [entry for entry in self._versions if entry.name == name]:
            entry.abort_at = self._versions.clock() + seconds
            self.retire(entry.adapter_id)

    def overstayed(self) -> dict[str, str]:
        """The requests that are to be ended because their adapter was drained: request id -> adapter."""
        return self._versions.overstayed()

    def restage(self) -> tuple[Entry, ...]:
        """Versions that unfinished requests need and the host cache has lost, now being staged again.

        The workers are to be asked as after `want`. Those without room stay `Host.WAITING`.
        """
        return self._copies.restage()

    @property
    def has_orders(self) -> bool:
        """Whether the workers are to be told something; an idle engine looks here for expired leases."""
        self._copies.sweep()
        return bool(self._journal)

    def take_orders(self) -> Orders:
        """The orders since the last call; to be sent in this sequence, with the next step or RPC."""
        self._copies.sweep()
        return self._journal.take()

    def acquire(self, request_id: str, adapter_id: int) -> None:
        """An unfinished request uses the version from now on, which ends `hold`; twice is once.

        A retired version stays held: more of its requests may be on their way, from other API servers.
        """
        if not self._versions.references.acquire(request_id, adapter_id):
            return
        entry = self._versions.get(adapter_id)
        self._journal.arrived(entry)
        if entry is not None:
            if not entry.retired:
                entry.hold_until = float("-inf")
            entry.uses += 1
            self._versions.touch(entry)
            self._host.touch(entry)

    def release(self, request_id: str) -> None:
        """The request is finished; unknown ones are fine."""
        self._waits.end((request_id,))
        adapter_id = self._versions.references.release(request_id)
        if adapter_id is not None:
            self._device.end_use(adapter_id)
            if (entry := self._versions.get(adapter_id)) is not None:
                self._host.touch(entry)
            self._copies.sweep()

    def begin_step(self, running: Mapping[str, int]) -> tuple[int, ...]:
        """A new step: of the unpinned adapters only those of running requests are in use.

        Args:
            running: request id -> adapter id, of the requests that run with an adapter.

        Returns:
            The adapters that are not on the device and find no room, which happens only to those that were
            never admitted: their requests must not run in this step.
        """
        self._waits.end(running)
        ids = tuple(dict.fromkeys(running.values()))
        self._device.begin_step(ids, self._overdue())
        self._copies.sweep()
        return tuple(adapter_id for adapter_id in ids if not self.try_admit(adapter_id, started=True))

    def try_admit(self, adapter_id: int, request_id: str | None = None, *, started: bool = False) -> bool:
        """Whether the adapter can be part of this step; if so, it is in use until the next one.

        Loads it in place of adapters that are not in use, if need be.

        Args:
            adapter_id: the adapter.
            request_id: for which request; one that finds no room waits from now on, and its time counts.
            started: the request ran before (it was preempted, or holds KV blocks), and goes on.
        """
        entry = self._versions.get(adapter_id)
        if entry is None or entry.host is not Host.READY:
            return False
        if not self._device.admit(entry, started=started):
            if request_id is not None:
                self._waits.begin(request_id, adapter_id, self._versions.clock())
            return False
        self._versions.touch(entry)
        return True

    @property
    def num_in_use(self) -> int:
        """Adapters that have a part in the present step."""
        return self._device.num_in_use

    def stand_back(self, request_id: str) -> None:
        """The request is kept back for another reason than room: no rows are set aside on its account."""
        self._waits.end((request_id,))

    def pin(self, adapter_id: int) -> None:
        """Keep a version on the device, loading it as soon as there is room.

        The pin of another version of the adapter moves over: running responses may still keep that one.

        Raises:
            AdapterNotFound: unknown version.
            Unavailable: it is not staged (`NOT_READY`), or no slab would be left without pins
                (`POOL_FULL`).
        """
        entry = self._versions.get(adapter_id)
        if entry is None or entry.retired:
            raise AdapterNotFound(Code.NOT_FOUND, f"the pool knows no adapter {adapter_id}")
        if entry.host is not Host.READY:
            raise Unavailable(
                Code.NOT_READY, f"adapter {entry.name!r} is not in the host cache", found=entry.host
            )
        if entry.pinned:
            return
        before = [other for other in self._versions if other.name == entry.name and other.pinned]
        for other in before:
            self._device.unpin(other)
        if not self._device.pin(entry):
            for other in before:
                self._device.pin(other)
            raise Unavailable(
                Code.POOL_FULL,
                f"pinning {entry.name!r} would leave no slab of the pool without pins",
                hint="unpin another adapter, or raise --max-loras",
            )

    def unpin(self, adapter_id: int) -> None:
        """Undo `pin`; unknown or not pinned is fine."""
        entry = self._versions.get(adapter_id)
        if entry is not None:
            self._device.unpin(entry)

    def evict(self, adapter_id: int) -> bool:
        """Take a version off the device and out of the host cache; False if it is in neither.

        Raises:
            AdapterBusy: it is in use or leased (`IN_USE`), or pinned (`PINNED`). `hold` alone does not keep
                it: its request has it staged again.
        """
        entry = self._versions.get(adapter_id)
        if entry is None or entry.host in (Host.ABSENT, Host.WAITING):
            return False
        if entry.pinned:
            raise AdapterBusy(Code.PINNED, f"adapter {entry.name!r} is pinned", hint="unpin it first")
        if self._versions.in_use(entry):
            raise AdapterBusy(Code.IN_USE, f"adapter {entry.name!r} is in use, or about to be")
        entry.hold_until = float("-inf")
        self._copies.forget(entry, Cause.OPERATOR)
        return True

    def retire(self, adapter_id: int) -> None:
        """The version is no longer served: unpin it, and let it go with its last reference and lease."""
        entry = self._versions.get(adapter_id)
        if entry is not None:
            self._device.unpin(entry)
            self._versions.retire(entry)
            self._copies.sweep()

    def reset_device(self) -> None:
        """The workers' arenas and tables were emptied (level-2 sleep, `reset_lora_state`).

        Call it when they can be written again: adapters in use and pins are ordered to be loaded to the
        rows they had; the others come back on demand.
        """
        self._device.reset()

    def discard(self, adapter_id: int) -> bool:
        """A version's copies are of no use: the base model's weights, which they were made of, were replaced.

        It is unpinned. True if there was one; what unfinished requests need of it is named by `restage`. No
        request that uses it may be in the next step before that.
        """
        entry = self._versions.get(adapter_id)
        if entry is None or entry.host in (Host.ABSENT, Host.WAITING):
            return False
        self._device.unpin(entry)
        self._device.end_use(adapter_id)
        self._copies.forget(entry, Cause.BASE)
        return True

    @property
    def host_free(self) -> int:
        """Bytes of the host cache that nobody has to leave for."""
        return self._host.free

    def get(self, adapter_id: int) -> Entry | None:
        """What is known of a version; for reading only."""
        return self._versions.get(adapter_id)

    @property
    def slabs(self) -> int:
        return self._device.extents.slabs

    def ready(self) -> Iterator[Entry]:
        """Versions that every worker has in host memory; for reading only."""
        return (entry for entry in self._versions if entry.host is Host.READY)

    def loading(self) -> Iterator[Entry]:
        """Versions that are being staged, or wait for room in the host cache; for reading only."""
        return (entry for entry in self._versions if entry.host in (Host.STAGING, Host.WAITING))

    def versions(self, name: str) -> list[dict[str, Any]]:
        """What `snapshot` shows of one adapter: all that are known take milliseconds of the steps' thread."""
        return [self._view(entry) for entry in self._versions if entry.name == name]

    def snapshot(self) -> dict[str, Any]:
        """Everything there is to show, as plain str, int, list and dict."""
        extents, now = self._device.extents, self._versions.clock()
        refs = self._versions.references.count
        return {
            "slabs": extents.slabs,
            "slab_rows": extents.slab_rows,
            "granule": extents.granule,
            "rows_total": extents.rows_total,
            "rows_free": extents.rows_free,
            "host_rows": sum(entry.rows for entry in self.ready()),
            "host_bytes": self._host.used,
            "device_bytes": sum(entry.nbytes for entry in self.ready() if entry.extent is not None),
            "host_budget": self._host.budget,
            "extents": [
                [extent_view(entry, refs(entry.adapter_id)) for entry in self._device.residents(slab)]
                for slab in range(extents.slabs)
            ],
            "adapters": [self._view(entry) for entry in self._versions],
            "waiting": {
                "requests": len(self._waits),
                "longest_seconds": self._waits.longest(now),
                "turns": len(self._device.turns),
            },
            "counters": self._journal.totals(),
        }

    def _view(self, entry: Entry) -> dict[str, Any]:
        refs = self._versions.references.count(entry.adapter_id)
        return adapter_view(entry, refs, self._versions.clock())

    def _overdue(self) -> Iterator[Entry]:
        for adapter_id in self._waits.overdue(self._versions.clock()):
            entry = self._versions.get(adapter_id)
            if entry is not None and entry.host is Host.READY:
                yield entry
