"""Every adapter by name: the one truth for the model list, the router and the admin endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from lora_plugin.directory.digests import Digests
from lora_plugin.directory.entry import Adapter, AdapterState, Version
from lora_plugin.directory.event_lines import EventLines
from lora_plugin.directory.events import EventLog
from lora_plugin.directory.folders import Folders
from lora_plugin.directory.ledger import Ledger
from lora_plugin.directory.scanner import Scanner
from lora_plugin.directory.state import State
from lora_plugin.errors import (
    AdapterIncomplete,
    AdapterNotFound,
    AdapterRejected,
    Code,
    Reason,
    Unavailable,
)


class Catalog:
    """The adapters of a directory.

    Written by `scan` and the operator's calls, under locks; read without any: `get`, `list` and `find` look
    into an immutable mapping that is replaced as a whole, so that they may be called from an event loop.
    Everything else may block on the disk.
    """

    def __init__(
        self,
        root: Path,
        folders: Folders,
        *,
        settle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """A catalog without entries; `scan` fills it.

        Args:
            root: the watched directory; need not exist yet.
            folders: what lies in it.
            settle_seconds: quiet time before a changed folder is read.
            clock: monotonic seconds.
            now: unix seconds.
        """
        self.root = root
        self.events = EventLog()
        self._folders = folders
        self._state = State(root)
        self._ledger = Ledger(self._state, self.events, now)
        self._digests = Digests(folders)
        self._scanner = Scanner(
            self._ledger,
            folders,
            self._state,
            self._digests,
            deliver=self.events.deliver,
            settle_seconds=settle_seconds,
            clock=clock,
        )
        self.events.subscribe(EventLines(self.get))

    def get(self, name: str) -> Adapter | None:
        """The adapter in whatever state; None where there is no such folder."""
        return self._ledger.adapters.get(name)

    def known(self, name: str) -> Adapter:
        """The adapter in whatever state. Raises AdapterNotFound where there is no such folder."""
        adapter = self.get(name)
        if adapter is None:
            raise AdapterNotFound.named(name)
        return adapter

    def list(self) -> tuple[Adapter, ...]:
        """Every adapter in every state, by name."""
        return tuple(sorted(self._ledger.adapters.values(), key=lambda adapter: adapter.name))

    def listed(self) -> tuple[Adapter, ...]:
        """The adapters that are served, by name."""
        return tuple(adapter for adapter in self.list() if adapter.state is AdapterState.LISTED)

    def find(self, name: str) -> Adapter:
        """The adapter that is served under the name.

        Raises:
            AdapterNotFound: NOT_FOUND; UNLOADED where the operator took it away.
            AdapterRejected: with the reason of the rejection.
            Unavailable: NOT_READY: it is still being copied.
        """
        adapter = self.known(name)
        match adapter.state:
            case AdapterState.LISTED:
                return adapter
            case AdapterState.UNLOADED:
                raise AdapterNotFound(Code.UNLOADED, f"the adapter {name!r} was unloaded by the operator")
            case AdapterState.REJECTED if adapter.reason:
                raise AdapterRejected.of(adapter.reason)
        reason = adapter.reason
        raise Unavailable(
            Code.NOT_READY,
            f"the adapter {name!r} is not whole yet",
            found=f"{reason.message} [{reason.code}]" if reason else None,
            hint=reason.hint if reason and reason.hint else "try again",
        )

    def pending(self) -> set[str]:
        """Names of the folders whose last change has not come to a conclusion, or that are not whole."""
        with self._ledger.writing():
            return {
                track.name
                for track in self._ledger.tracks.values()
                if track.look_at is not None or track.state is AdapterState.SETTLING
            }

    def due(self) -> set[str]:
        """Names of the folders that are quiet and were not examined yet: the next `scan` does."""
        return self._scanner.due()

    def reachable(self) -> bool:
        """Whether the directory is there, and not an empty one in place of a mount."""
        return self._folders.reachable()

    def path_of(self, name: str) -> Path:
        """The folder of an adapter; the name must come from this catalog."""
        return self.root / name

    def scan(self, names: Iterable[str] | None = None) -> float | None:
        """Looks at these folders, or all, and at those whose settle time is over.

        Returns:
            After how many seconds a folder wants to be looked at again; None: only when it changes.
        """
        return self._scanner.scan(names)

    def version_of(self, name: str) -> Version:
        """The version that is served; computes its digest where nobody did yet, once for all callers.

        Raises:
            AdapterNotFound, AdapterRejected, Unavailable: as `find`.
            AdapterIncomplete: its files changed and the new content is not listed yet; `scan` and try again.
        """
        if (version := self.find(name).version) is not None:
            return version
        with self._ledger.writing():
            track = self._ledger.tracks.get(name)
            content = track.content if track else None
        if track is not None and content is not None:
            digest = self._digests.compute(name, content)
            with self._ledger.writing():
                self._ledger.fix(track, content, digest)
        if (version := self.find(name).version) is not None:
            return version
        raise AdapterIncomplete(Code.CHANGED, f"the files of {name!r} changed while they were read")

    def reject(self, name: str, digest: str, reason: Reason) -> None:
        """A worker found this version bad (NaN, ...): not served until its files change."""
        with self._ledger.writing():
            track = self._ledger.tracks.get(name)
            if track is not None and track.served and track.digest == digest:
                self._ledger.refuse(track, reason, track.content)
        self.events.deliver()

    def unload(self, name: str) -> Adapter:
        """Stops serving it until its files change, on every API server. Raises as `find`."""
        adapter = self.find(name)
        if adapter.fingerprint is not None:
            self._state.unload(name, adapter.fingerprint)
        return self._decided(name)

    def reload(self, name: str) -> Adapter:
        """Takes back `unload` and any rejection, and looks at the folder again.

        Raises:
            AdapterNotFound: there is no such folder.
        """
        self.known(name)
        self._state.restore(name)
        with self._ledger.writing():
            if (track := self._ledger.tracks.get(name)) is not None:
                track.look_at = track.changed_at
                if track.state is AdapterState.REJECTED:
                    track.content = None
        self._decided(name)
        self.scan((name,))
        return self.known(name)

    def pin(self, name: str) -> Adapter:
        """Notes that the operator wants it kept loaded. Raises as `find`."""
        self.find(name)
        self._state.pin(name)
        return self._decided(name)

    def unpin(self, name: str) -> Adapter:
        """The inverse of `pin`. Raises AdapterNotFound."""
        self.known(name)
        self._state.unpin(name)
        return self._decided(name)

    def _decided(self, name: str) -> Adapter:
        with self._ledger.writing():
            if (track := self._ledger.tracks.get(name)) is not None:
                self._ledger.decide(track)
        self.events.deliver()
        return self.known(name)
