"""The thread that keeps the catalog up to date: file events, settle times and the periodic rescan."""

from __future__ import annotations

import logging
import threading
import time

from lora_plugin.catalog import Catalog
from lora_plugin.observation import Observation
from lora_plugin.settings import Settings

logger = logging.getLogger("lora_plugin")

_DEBOUNCE_SECONDS = 0.05
"""Events of one change come in a burst; a replacement by rename is two of them."""


class Watcher:
    """Turns "these folders may have changed" into scans, on a daemon thread.

    Args:
        catalog: what is scanned.
        settings: the operator's: `watch`, `rescan_seconds`, `settle_seconds`.
    """

    def __init__(self, catalog: Catalog, settings: Settings) -> None:
        self._catalog = catalog
        self._rescan_seconds = settings.rescan_seconds
        self._settling_seconds = max(1.0, 3 * settings.settle_seconds)
        self._condition = threading.Condition()
        self._dirty: set[str] = set()
        self._stopping = False
        self._scanned = False
        self._unsettled: set[str] = set()
        self._next_rescan = 0.0
        self._next_look: float | None = None
        self._observation = Observation(
            catalog.root, settings.watch, settings.rescan_seconds, self._note_change
        )
        self._thread = threading.Thread(target=self._run, name="lora-plugin-watcher", daemon=True)

    def start(self) -> None:
        """Makes the directory where it is missing, and starts watching and scanning."""
        try:
            self._catalog.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning(
                "The adapter directory %s is missing and cannot be made (%s): waiting for it",
                self._catalog.root,
                error.strerror,
            )
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and the observation; a second call does nothing."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def first_scan(self, timeout: float | None = None) -> bool:
        """Waits until every folder that was there at the start is listed or rejected.

        A copy in progress, or a folder that stays incomplete, is waited for no longer than a second (or three
        settle times).

        Args:
            timeout: seconds to wait at most.

        Returns:
            Whether the scan was finished in time.
        """
        with self._condition:
            deadline = None if timeout is None else time.monotonic() + timeout
            done = self._condition.wait_for(lambda: self._scanned or self._stopping, timeout)
            settling = self._settling_seconds
            if deadline is not None:
                settling = min(settling, max(0.0, deadline - time.monotonic()))
            self._condition.wait_for(lambda: not self._unsettled or self._stopping, settling)
            return done and self._scanned

    def _note_change(self, name: str) -> None:
        with self._condition:
            self._dirty.add(name)
            self._condition.notify_all()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._step()
            except Exception:
                logger.exception("A scan of the adapter directory failed; the next one will try again")
                self._next_look = time.monotonic() + self._rescan_seconds
            self._pause()
        self._observation.stop()

    def _step(self) -> None:
        with self._condition:
            dirty, self._dirty = self._dirty, set()
        if time.monotonic() >= self._next_rescan:
            self._next_rescan = time.monotonic() + self._rescan_seconds
            # Observed before it is scanned: no change falls between the two.
            self._observation.refresh()
            self._note_scan(self._catalog.scan(), full=True)
        else:
            self._note_scan(self._catalog.scan(dirty), full=False)

    def _note_scan(self, wait: float | None, *, full: bool) -> None:
        self._next_look = None if wait is None else time.monotonic() + wait
        pending = self._catalog.pending()
        with self._condition:
            if full and not self._scanned:
                self._scanned, self._unsettled = True, pending
            self._unsettled &= pending
            self._condition.notify_all()

    def _pause(self) -> None:
        """Waits for a change, the next settle time or the next rescan."""
        due = self._next_rescan if self._next_look is None else min(self._next_look, self._next_rescan)
        with self._condition:
            self._condition.wait_for(lambda: self._dirty or self._stopping, max(0.0, due - time.monotonic()))
            if self._dirty and not self._stopping:
                self._condition.wait_for(lambda: self._stopping, _DEBOUNCE_SECONDS)
