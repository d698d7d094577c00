"""File events of the watched directory, as names of folders that may have changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserver

logger = logging.getLogger("lora_plugin")

# Reading a folder makes these; reacting to them would read it again.
_READS = frozenset({"opened", "closed_no_write"})
_ENDS = frozenset({"deleted", "moved"})
_MAX_POLL_SECONDS = 1.0


class Observation(FileSystemEventHandler):
    """Watches a directory that may be missing, removed, made again or mounted over.

    Args:
        root: the directory.
        mode: events; poll; or auto: events until they fail, then poll, said once.
        poll_seconds: between two looks when polling; at most one second is used.
        changed: called from the observer's thread with the name of a folder in `root`.
    """

    def __init__(
        self,
        root: Path,
        mode: Literal["auto", "events", "poll"],
        poll_seconds: float,
        changed: Callable[[str], None],
    ) -> None:
        self._root = root
        self._real_root = root
        self._mode = mode
        self._poll_seconds = min(poll_seconds, _MAX_POLL_SECONDS)
        self._changed = changed
        self._observer: BaseObserver | None = None
        self._watched: tuple[int, int] | None = None
        self._failed: str | None = None

    def refresh(self) -> bool:
        """Starts observing where it is not, or no longer; returns whether it started anew."""
        present = self._identity()
        if present is not None and present == self._watched and self._alive():
            return False
        self.stop()
        if present is None:
            return False
        self._observer = self._start()
        self._watched = present if self._observer is not None else None
        return self._observer is not None

    def stop(self) -> None:
        """Ends observing; a later `refresh` starts it again."""
        observer, self._observer, self._watched = self._observer, None, None
        if observer is not None:
            observer.stop()
            observer.join(timeout=2)

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Watchdog's: any change to a file or folder."""
        if event.event_type in _READS:
            return
        for path in (event.src_path, event.dest_path):
            name = self._folder(os.fsdecode(path)) if path else os.curdir
            if name not in (os.curdir, os.pardir):
                self._changed(name)
            elif path and event.event_type in _ENDS:
                # The directory itself went; what is made in its place may have the same inode.
                self._watched = None

    def _folder(self, path: str) -> str:
        relative = os.path.relpath(path, self._real_root)
        return relative.split(os.sep, 1)[0]

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._root.stat()
        except OSError:
            return None
        return (found.st_dev, found.st_ino)

    def _alive(self) -> bool:
        # An emitter ends by itself when its directory goes.
        observer = self._observer
        return observer is not None and observer.is_alive() and all(e.is_alive() for e in observer.emitters)

    def _start(self) -> BaseObserver | None:
        if self._mode == "poll":
            return self._started(PollingObserver(timeout=self._poll_seconds))
        try:
            return self._started(Observer())
        except OSError as error:
            self._say_failed(error)
            return (
                self._started(PollingObserver(timeout=self._poll_seconds)) if self._mode == "auto" else None
            )

    def _started(self, observer: BaseObserver) -> BaseObserver:
        # Watchdog does not follow a link to the directory itself.
        self._real_root = self._root.resolve()
        observer.schedule(self, str(self._real_root), recursive=True)
        observer.start()
        return observer

    def _say_failed(self, error: OSError) -> None:
        if self._failed is None:
            self._failed = error.strerror or str(error)
            instead = "polling" if self._mode == "auto" else "only the periodic rescan sees changes"
            logger.warning(
                "File events do not work for %s (%s): %s; raising fs.inotify.max_user_watches may help",
                self._root,
                self._failed,
                instead,
            )
        if self._mode == "auto":
            self._mode = "poll"
