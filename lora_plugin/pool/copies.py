"""The workers' host copies: which are asked for, which are there, which go for others."""

from __future__ import annotations

from lora_plugin.errors import AdapterRejected, Reason
from lora_plugin.pool.checks import check_identity, check_rows, check_size
from lora_plugin.pool.device import Device
from lora_plugin.pool.entry import Entry, Host
from lora_plugin.pool.extents import round_up
from lora_plugin.pool.host import HostCache
from lora_plugin.pool.journal import Cause, Journal
from lora_plugin.pool.versions import Versions


class Copies:
    """Moves versions between absent, waiting, staging and ready.

    Args:
        versions: all that are known.
        cache: the bytes.
        device: a version that loses its host copy leaves it, too.
        journal: takes the orders for the workers.
    """

    def __init__(self, versions: Versions, cache: HostCache, device: Device, journal: Journal) -> None:
        self.cache = cache
        self._versions = versions
        self._device = device
        self._journal = journal

    def want(
        self, adapter_id: int, name: str, digest: str, path: str, nbytes: int, *, served: bool = True
    ) -> bool:
        """See `AdapterPool.want`."""
        self.sweep()
        entry = self._versions.get(adapter_id) or Entry(adapter_id, name, digest, path, nbytes)
        check_identity(entry, name, digest)
        check_size(entry, nbytes, self.cache.budget)
        self._versions.add(entry)
        if served:
            self._versions.revive(entry)
        self._versions.touch(entry)
        if entry.host in (Host.STAGING, Host.READY):
            return False
        entry.path, entry.nbytes = path, nbytes
        return self._begin(entry)

    def staged(self, adapter_id: int, rows: int, nbytes: int, seconds: float) -> bool:
        """See `AdapterPool.staged`."""
        entry = self._versions.get(adapter_id)
        if entry is not None and entry.host is Host.READY:
            return True
        if entry is None or entry.host is not Host.STAGING:
            self._journal.forget(adapter_id)
            return False
        try:
            check_size(entry, nbytes, self.cache.budget)
            check_rows(entry, rows, self._device.extents.slab_rows)
        except AdapterRejected as error:
            self.failed(adapter_id, error.reason)
            raise
        self.cache.unstage(entry)
        entry.rows, entry.nbytes, entry.load_seconds = (
            round_up(rows, self._device.extents.granule),
            nbytes,
            seconds,
        )
        victims = self.cache.victims(nbytes, self._versions.evictable)
        if victims is None:
            entry.host = Host.WAITING
            self._journal.forget(adapter_id)
            return False
        for victim in victims:
            self.forget(victim, Cause.HOST_ROOM)
        entry.host, entry.uses = Host.READY, self._versions.references.count(adapter_id)
        self.cache.add(entry)
        self._versions.touch(entry)
        return True

    def failed(self, adapter_id: int, reason: Reason) -> None:
        """See `AdapterPool.failed`."""
        entry = self._versions.get(adapter_id)
        if entry is None or entry.host is not Host.STAGING:
            return
        self._journal.failures[reason.code] += 1
        self.cache.unstage(entry)
        self._journal.forget(adapter_id)
        self._versions.delete(entry)

    def restage(self) -> tuple[Entry, ...]:
        """See `AdapterPool.restage`."""
        lost = (self._versions.get(adapter_id) for adapter_id in self._versions.references.adapters())
        with self.cache.moment():
            return tuple(
                entry
                for entry in lost
                if entry is not None and entry.host in (Host.ABSENT, Host.WAITING) and self._begin(entry)
            )

    def forget(self, entry: Entry, cause: Cause) -> None:
        """Take a version that is staging or ready off the device and out of host memory."""
        self._device.drop(entry)
        if entry.host is Host.STAGING:
            self.cache.unstage(entry)
        elif cause is Cause.HOST_ROOM:
            self.cache.evict(entry)
        else:
            self.cache.remove(entry)
        entry.host = Host.ABSENT
        self._journal.forget(entry.adapter_id)
        self._journal.evicted(entry, cause)

    def sweep(self) -> None:
        """Retired versions leave as soon as nothing uses them; leases end without an event."""
        for entry in self._versions.done():
            if entry.host in (Host.STAGING, Host.READY):
                self.forget(entry, Cause.RETIRED)
            self._versions.delete(entry)

    def _begin(self, entry: Entry) -> bool:
        """Have it staged if there is, or will be, room for it; else it waits."""
        if not self.cache.may_stage(entry.nbytes, self._versions.evictable):
            entry.host = Host.WAITING
            return False
        self.cache.stage(entry)
        entry.host = Host.STAGING
        return True
