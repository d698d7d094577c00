"""Looks at folders and moves their tracks: what changed is examined once it is quiet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lora_plugin.directory.digests import Digests
from lora_plugin.directory.folders import Content, Folders
from lora_plugin.directory.ledger import Ledger, version_for
from lora_plugin.directory.state import State
from lora_plugin.directory.track import Track
from lora_plugin.errors import (
    AdapterIncomplete,
    AdapterRejected,
    Code,
    LoraPluginError,
    Reason,
)

logger = logging.getLogger("lora_plugin")

_PATIENCE = 5
"""Settle times that bad content must stay before it ends a served version: its copy may have stalled."""
_SOON = 0.05
"""Seconds until a folder that changed under the check is looked at again, at least."""


@dataclass(frozen=True, slots=True)
class _Update:
    """Newer content of a version whose digest is known; whether it is another version, its digest tells."""

    track: Track
    stamp: str
    content: Content


class Scanner:
    """`Catalog.scan`: one at a time looks at folders; the digests of updates are computed after that."""

    def __init__(
        self,
        ledger: Ledger,
        folders: Folders,
        state: State,
        digests: Digests,
        *,
        deliver: Callable[[], None],
        settle_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._scanned = False
        self._ledger = ledger
        self._folders = folders
        self._state = state
        self._digests = digests
        self._deliver = deliver
        self._settle = settle_seconds
        self._clock = clock
        self._scanning = threading.Lock()

    def scan(self, names: Iterable[str] | None) -> float | None:
        """See `Catalog.scan`."""
        with self._scanning:
            wanted = self._wanted(names)
            if self._folders.reachable():
                # The state file goes and comes back with its directory.
                self._follow_operator()
            updates = [update for name in wanted or () if (update := self._look(name))]
            self._scanned |= names is None and wanted is not None
        self._deliver()
        for update in updates:
            self._update(update)
        self._deliver()
        return self._next()

    def due(self) -> set[str]:
        """See `Catalog.due`."""
        now = self._clock()
        with self._ledger.writing():
            return {track.name for track in self._ledger.tracks.values() if track.wait(now) == 0}

    def _follow_operator(self) -> None:
        changed = self._state.reload()
        if changed:
            with self._ledger.writing():
                for name in changed & self._ledger.tracks.keys():
                    self._ledger.decide(self._ledger.tracks[name])

    def _wanted(self, names: Iterable[str] | None) -> list[str] | None:
        if names is not None:
            return sorted(self.due().union(map(self._folders.adapter_of, names)))
        found = self._folders.names()
        if found is None:
            return None
        return sorted(found | self._ledger.tracks.keys())

    def _look(self, name: str) -> _Update | None:
        try:
            stamp = self._folders.stamp(name)
            track = self._see(name, stamp)
            if stamp is None or track is None:
                return None
            outcome = self._examine(name)
            if self._folders.stamp(name) != stamp:
                return None
        except OSError as error:
            self._postpone(name, error)
            return None
        with self._ledger.writing():
            return self._conclude(track, outcome)

    def _see(self, name: str, stamp: str | None) -> Track | None:
        """Notes what is there; returns the track if it is to be examined now."""
        gone = stamp is None and self._folders.reachable()
        now = self._clock()
        with self._ledger.writing():
            if stamp is None:
                if gone:
                    self._ledger.retire(name)
                return None
            track = self._ledger.tracks.get(name) or self._discover(name, stamp, now)
            track.see(stamp, now, self._settle)
            return track if track.wait(now) == 0 else None

    def _discover(self, name: str, stamp: str, now: float) -> Track:
        return self._ledger.discover(name, stamp, now, look_at=now + self._settle, at_start=not self._scanned)

    def _examine(self, name: str) -> Content | LoraPluginError:
        try:
            return self._folders.inspect(name)
        except LoraPluginError as error:
            return error
        except OSError:
            raise
        except Exception as error:
            return _unexpected(name, error)

    def _conclude(self, track: Track, outcome: Content | LoraPluginError) -> _Update | None:
        if isinstance(outcome, Content):
            return self._accept(track, outcome)
        if isinstance(outcome, AdapterRejected):
            self._reject(track, outcome.reason)
        elif isinstance(outcome, AdapterIncomplete):
            track.look_at = None
            self._ledger.incomplete(track, outcome.reason)
            _try_again(track, outcome.reason)
        return None

    def _accept(self, track: Track, content: Content) -> _Update | None:
        known = track.content
        if track.served and track.version and known and known.fingerprint != content.fingerprint:
            return _Update(track, track.stamp, content)
        track.look_at = None
        self._ledger.whole(track, content)
        return None

    def _reject(self, track: Track, reason: Reason) -> None:
        patient_until = track.changed_at + _PATIENCE * self._settle
        if track.served and self._clock() < patient_until:
            track.look_at = patient_until
            return
        track.look_at = None
        self._ledger.refuse(track, reason)
        _try_again(track, reason)

    def _update(self, update: _Update) -> None:
        track, content = update.track, update.content
        outcome = self._digest(track.name, content)
        with self._ledger.writing():
            if self._ledger.tracks.get(track.name) is not track or track.stamp != update.stamp:
                return
            if isinstance(outcome, str):
                track.look_at = None
                self._ledger.whole(track, content, version_for(track.name, content, outcome))
            elif isinstance(outcome, AdapterRejected):
                self._reject(track, outcome.reason)
            else:
                track.look_at = self._clock() + max(self._settle, _SOON)

    def _digest(self, name: str, content: Content) -> str | LoraPluginError:
        try:
            return self._digests.compute(name, content)
        except LoraPluginError as error:
            return error
        except OSError as error:
            return AdapterIncomplete(Code.UNREADABLE, f"a file cannot be read: {error.strerror}")
        except Exception as error:
            return _unexpected(name, error)

    def _postpone(self, name: str, error: OSError) -> None:
        """The disk does not answer: what is known stays, and the next rescan looks again."""
        logger.debug("adapter %r cannot be looked at: %s", name, error)
        with self._ledger.writing():
            track = self._ledger.tracks.get(name)
            if track is not None:
                track.stamp, track.look_at = "", None

    def _next(self) -> float | None:
        now = self._clock()
        with self._ledger.writing():
            waits = [track.wait(now) for track in self._ledger.tracks.values()]
        return min((max(wait, _SOON) for wait in waits if wait is not None), default=None)


def _try_again(track: Track, reason: Reason) -> None:
    if reason.code is Code.UNREADABLE:
        # May pass without any change to see: every rescan looks again.
        track.stamp = ""


def _unexpected(name: str, error: Exception) -> AdapterRejected:
    logger.error("The check of adapter %r failed unexpectedly", name, exc_info=error)
    return AdapterRejected(
        Code.INTERNAL,
        "the check of the adapter failed unexpectedly",
        found=type(error).__name__,
        hint="see the server's log",
    )
