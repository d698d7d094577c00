"""The transitions of an adapter's life, and the snapshot of all of them that readers see."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from lora_plugin.adapter.digest import adapter_id
from lora_plugin.directory.entry import Adapter, AdapterState, Version
from lora_plugin.directory.events import EventKind, EventLog
from lora_plugin.directory.folders import Content
from lora_plugin.directory.state import State
from lora_plugin.directory.track import Track
from lora_plugin.errors import Reason

logger = logging.getLogger("lora_plugin")


class Ledger:
    """Every folder's track. Transitions happen inside `writing()`; `adapters` may be read at any time.

    Events are recorded by the transitions and delivered by whoever called them, after `writing()`.
    """

    def __init__(self, state: State, events: EventLog, now: Callable[[], float]) -> None:
        self.adapters: Mapping[str, Adapter] = {}
        self.tracks: dict[str, Track] = {}
        self._state = state
        self._events = events
        self._now = now
        self._lock = threading.Lock()
        self._touched: set[str] = set()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Excludes other writers; on leaving, readers see all that was done, at once."""
        with self._lock:
            try:
                yield
            finally:
                self._publish()

    def touch(self, name: str) -> None:
        """What readers see of this name is to be renewed."""
        self._touched.add(name)

    def discover(self, name: str, stamp: str, clock: float, *, look_at: float, at_start: bool) -> Track:
        track = self.tracks[name] = Track(name, self._now(), stamp, clock, look_at, at_start)
        self._tell(EventKind.DISCOVERED, track)
        return track

    def incomplete(self, track: Track, reason: Reason) -> None:
        """The folder is not whole: what was served before still is."""
        first = track.reason is None or track.state is AdapterState.REJECTED
        if not track.served:
            track.state, track.content, track.version = AdapterState.SETTLING, None, None
        track.reason = reason
        if first:
            self._tell(EventKind.SETTLING, track, reason=reason)
        self.touch(track.name)

    def whole(self, track: Track, content: Content, version: Version | None = None) -> None:
        """The folder passed its check: it is listed, or its newer content takes the old one's place.

        Args:
            track: the folder.
            content: what is in it now.
            version: the one that `content` is, where that is known.
        """
        unchanged = track.content is not None and track.content.fingerprint == content.fingerprint
        if track.state is AdapterState.REJECTED and unchanged:
            return
        kept = unchanged or (version is not None and version == track.version)
        if not kept:
            track.version = version
        known = track.content.warnings if track.content else ()
        odd = [warning for warning in content.warnings if warning not in known]
        track.content = content
        news = EventKind.UPDATED if track.served else EventKind.LISTED
        quiet = track.served and kept
        track.reason = None
        track.state = AdapterState.LISTED
        if self._unloaded(track):
            self._unload(track)
        elif not quiet:
            track.listed_at = self._now()
            self._tell(news, track, version=track.digest)
        elif odd:
            logger.warning("adapter %r: %s", track.name, "; ".join(odd))
        self.touch(track.name)

    def refuse(self, track: Track, reason: Reason, bad: Content | None = None) -> None:
        """It cannot be served, nor what was served before.

        Args:
            track: the folder.
            reason: why.
            bad: content that passed the check and that a worker found bad: not listed again as it is.
        """
        if track.state is AdapterState.REJECTED and track.reason == reason:
            return
        track.state, track.reason, track.content = AdapterState.REJECTED, reason, bad
        self._tell(EventKind.REJECTED, track, version=track.digest, reason=reason)
        track.version = None

    def retire(self, name: str) -> None:
        """Its folder is gone."""
        track = self.tracks.pop(name, None)
        if track is not None:
            self._tell(EventKind.RETIRED, track, version=track.digest)

    def decide(self, track: Track) -> None:
        """Follows the operator's present decisions about a track."""
        if track.served and self._unloaded(track):
            self._unload(track)
        elif track.state is AdapterState.UNLOADED and not self._unloaded(track):
            track.state = AdapterState.LISTED
            self._tell(EventKind.LISTED, track, version=track.digest)
        shown, pinned = self.adapters.get(track.name), track.name in self._state.pinned
        if shown is not None and shown.pinned != pinned:
            self._tell(EventKind.PINNED if pinned else EventKind.UNPINNED, track, version=track.digest)
        self.touch(track.name)

    def fix(self, track: Track, content: Content, digest: str) -> None:
        """The digest of what is served became known."""
        present = track.content is not None and track.content.fingerprint == content.fingerprint
        if present and track.version is None:
            track.version = version_for(track.name, content, digest)
            self.touch(track.name)

    def _unloaded(self, track: Track) -> bool:
        return track.content is not None and self._state.unloaded.get(track.name) == track.content.fingerprint

    def _unload(self, track: Track) -> None:
        track.state = AdapterState.UNLOADED
        self._tell(EventKind.UNLOADED, track, version=track.digest)

    def _tell(
        self, kind: EventKind, track: Track, *, version: str | None = None, reason: Reason | None = None
    ) -> None:
        self._events.record(kind, track.name, time=self._now(), version=version, reason=reason)
        self.touch(track.name)

    def _publish(self) -> None:
        if not self._touched:
            return
        adapters = dict(self.adapters)
        for name in self._touched:
            if (track := self.tracks.get(name)) is not None:
                adapters[name] = track.view(pinned=name in self._state.pinned)
            else:
                adapters.pop(name, None)
        self._touched.clear()
        self.adapters = adapters


def version_for(name: str, content: Content, digest: str) -> Version:
    """The version that a digest of a folder's content stands for."""
    return Version(name, digest, adapter_id(name, digest), content.rank, content.nbytes, content.packed_bytes)
