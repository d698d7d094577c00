"""The catalog's bookkeeping for one folder."""

from __future__ import annotations

from dataclasses import dataclass

from lora_plugin.directory.entry import Adapter, AdapterState, Version
from lora_plugin.directory.folders import Content
from lora_plugin.errors import Reason


@dataclass(slots=True)
class Track:
    """One folder, guarded by the catalog's lock.

    Attributes:
        name: the folder's name.
        discovered_at: unix seconds.
        stamp: the folder's stat data when it was last looked at.
        changed_at: monotonic seconds: when the stamp was first seen.
        look_at: monotonic seconds: when it is to be examined; None: it was, since its last change.
        at_start: whether the first scan found it.
        state: as in `Adapter`; unchanged by new content until that is examined.
        reason: as in `Adapter`.
        content: what is served, was unloaded, or was found bad by a worker.
        version: of `content`, once computed.
        listed_at: unix seconds.
    """

    name: str
    discovered_at: float
    stamp: str
    changed_at: float
    look_at: float | None
    at_start: bool
    state: AdapterState = AdapterState.DISCOVERED
    reason: Reason | None = None
    content: Content | None = None
    version: Version | None = None
    listed_at: float | None = None

    @property
    def served(self) -> bool:
        return self.state is AdapterState.LISTED

    @property
    def digest(self) -> str | None:
        return self.version.digest if self.version else None

    def see(self, stamp: str, now: float, settle: float) -> None:
        """Notes the folder's present stamp; a new one is to be examined after the settle time."""
        if stamp != self.stamp:
            self.stamp, self.changed_at, self.look_at = stamp, now, now + settle

    def wait(self, now: float) -> float | None:
        """Seconds until it is to be examined; 0: now; None: not before it changes."""
        return None if self.look_at is None else max(0.0, self.look_at - now)

    def view(self, *, pinned: bool) -> Adapter:
        content = self.content
        return Adapter(
            name=self.name,
            state=self.state,
            discovered_at=self.discovered_at,
            reason=self.reason,
            version=self.version,
            fingerprint=content.fingerprint if content else None,
            rank=content.rank if content else None,
            targets=content.targets if content else (),
            nbytes=content.nbytes if content else None,
            packed_bytes=content.packed_bytes if content else None,
            base_model=content.base_model if content else None,
            warnings=content.warnings if content else (),
            source=content.source if content else None,
            listed_at=self.listed_at,
            at_start=self.at_start,
            pinned=pinned,
        )
