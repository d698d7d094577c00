"""File events of the watched directory, as names of folders that may have changed."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, EventEmitter

logger = logging.getLogger("lora_plugin")

# For every folder that is moved watchdog warns of itself, with all folders that it watches in the message.
warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"watchdog\.observers")
logging.getLogger("watchdog.observers").setLevel(logging.ERROR)

# Reading a folder makes these; reacting to them would read it again.
_READS = frozenset({"opened", "closed_no_write"})
_LEAVES = frozenset({"deleted", "moved"})
_REST_SECONDS = 1.0
_REST_FACTOR = 10.0
"""Between two beginnings: each costs a look at every folder, and thousands of them may come and go."""


class Observation(FileSystemEventHandler):
    """Watches a directory that may be missing, removed, made again or mounted over.

    Args:
        root: the directory.
        changed: called from the observer's thread with the name of a folder in `root`.
    """

    def __init__(self, root: Path, changed: Callable[[str], None]) -> None:
        self._root = root
        self._real_root = root
        self._changed = changed
        self._observer: BaseObserver | None = None
        self._threads: list[threading.Thread] = []
        self._watched: tuple[int, int] | None = None
        self._stale = False
        self._rest_until = 0.0

    def refresh(self) -> bool:
        """Starts observing where it is not, or no longer as it should.

        Returns:
            Whether it started anew: what changed until now may have made no event.

        Raises:
            OSError: file events do not work here.
        """
        present = self._identity()
        if present is not None and present == self._watched:
            if self._stale and time.monotonic() < self._rest_until:
                return False
            if not self._stale:
                if all(thread.is_alive() for thread in self._threads):
                    return False
                raise OSError("the thread that reads them ended")
        self.stop()
        if present is None:
            return False
        started = time.monotonic()
        self._start()
        self._watched = present
        self._rest_until = time.monotonic() + max(_REST_SECONDS, _REST_FACTOR * (time.monotonic() - started))
        return True

    @property
    def refresh_at(self) -> float | None:
        """Monotonic seconds: when `refresh` is wanted although nothing else is to be done."""
        return self._rest_until if self._stale else None

    def stop(self) -> None:
        """Ends observing; a later `refresh` starts it again."""
        observer, self._observer = self._observer, None
        self._watched, self._threads, self._stale = None, [], False
        if observer is None:
            return
        try:
            observer.stop()
        except Exception as error:
            # Watchdog 7 loses count of folders that were moved away.
            logger.debug("the observer ended with %r", error)
        observer.join(timeout=2)

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Watchdog's: any change to a file or folder."""
        if event.event_type in _READS:
            return
        if event.is_directory and event.event_type in _LEAVES:
            # Watchdog keeps a moved folder's watch under its old path, and its reader would die of that when
            # both the folder and its successor are deleted; what replaces the root may have the same inode.
            self._stale = True
        for path in (event.src_path, event.dest_path):
            name = self._folder(os.fsdecode(path)) if path else os.curdir
            if name != os.pardir:
                self._changed(name)

    def _folder(self, path: str) -> str:
        return os.path.relpath(path, self._real_root).split(os.sep, 1)[0]

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._root.stat()
        except OSError:
            return None
        return (found.st_dev, found.st_ino)

    def _start(self) -> None:
        # Watchdog does not follow a link to the directory itself.
        self._real_root = self._root.resolve()
        self._observer = Observer()
        self._observer.schedule(self, str(self._real_root), recursive=True)
        self._observer.start()
        self._threads = [thread for thread in threading.enumerate() if self._needs(thread)]

    def _needs(self, thread: threading.Thread) -> bool:
        """Whether our events come through it: our own threads, and watchdog's shared reader."""
        if isinstance(thread, EventEmitter | BaseObserver):
            observer = self._observer
            return observer is not None and (thread is observer or thread in observer.emitters)
        return type(thread).__module__.startswith("watchdog.")
