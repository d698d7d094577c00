"""The thread that keeps the catalog up to date: file events, settle times and the periodic rescan."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.observation import Observation
from lora_plugin.settings import Settings

logger = logging.getLogger("lora_plugin")

_POLL_SECONDS = 1.0
"""Between two rescans, at most, where file events are not used."""
_SETTLING_SECONDS = 1.0
"""How long the start waits for copies in progress, at least."""
_SOON = 0.05
_DEBOUNCE_SECONDS = 0.05
"""Events of one change come in a burst; a replacement by rename is two of them."""


class Watcher:
    """Turns "these folders may have changed" into scans, on a daemon thread.

    Args:
        catalog: what is scanned.
        settings: the operator's: `watch`, `rescan_seconds`, `settle_seconds`.
        look: looks at other files of the directory with every scan, and says after how many seconds it wants
            to do so again.
    """

    def __init__(
        self, catalog: Catalog, settings: Settings, look: Callable[[], float | None] = lambda: None
    ) -> None:
        self._catalog = catalog
        self._look = look
        self._settling_seconds = max(_SETTLING_SECONDS, 3 * settings.settle_seconds)
        self._condition = threading.Condition()
        self._dirty: set[str] = set()
        self._stopping = False
        self._settled = False
        self._give_up_at: float | None = None
        self._unsettled: set[str] = set()
        self._next_rescan = 0.0
        self._next_look: float | None = None
        self._mode = settings.watch
        self._use_events = settings.watch != "poll"
        self._interval = settings.rescan_seconds
        if not self._use_events:
            self._interval = min(self._interval, _POLL_SECONDS)
        self._observation = Observation(catalog.root, self._note_change)
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
            self._condition.wait_for(lambda: self._settled or self._stopping, timeout)
            return self._settled

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
                self._next_look = time.monotonic() + self._interval
            self._pause()
        self._observation.stop()

    def _step(self) -> None:
        with self._condition:
            dirty, self._dirty = self._dirty, set()
        # Observed before it is scanned: no change falls between the two.
        renewed = self._use_events and self._observe()
        full = renewed or time.monotonic() >= self._next_rescan
        if full:
            self._next_rescan = time.monotonic() + self._interval
        waits = (self._catalog.scan(None if full else dirty), self._look())
        self._note_scan(min((wait for wait in waits if wait is not None), default=None), full=full)

    def _observe(self) -> bool:
        """Whether the observation began anew, or ended: what changed until now may have made no event."""
        try:
            return self._observation.refresh()
        except (FileNotFoundError, NotADirectoryError):
            # The directory went this moment; the next rescan sees.
            return False
        except OSError as error:
            self._do_without_events(error)
            return True

    def _do_without_events(self, error: OSError) -> None:
        self._observation.stop()
        self._use_events = False
        if self._mode == "auto":
            self._interval = min(self._interval, _POLL_SECONDS)
        logger.warning(
            "File events do not work for %s (%s): it is looked through every %g seconds",
            self._catalog.root,
            error,
            self._interval,
        )

    def _note_scan(self, wait: float | None, *, full: bool) -> None:
        now = time.monotonic()
        self._next_look = None if wait is None else now + wait
        if not self._settled:
            self._note_first(now, full=full)

    def _note_first(self, now: float, *, full: bool) -> None:
        if full and self._give_up_at is None:
            self._give_up_at, self._unsettled = now + self._settling_seconds, self._catalog.pending()
        if self._give_up_at is None:
            return
        self._unsettled &= self._catalog.pending()
        given_up = now >= self._give_up_at and not self._unsettled & self._catalog.due()
        if not self._unsettled or given_up:
            with self._condition:
                self._settled = True
                self._condition.notify_all()
        else:
            self._next_look = min(self._next_look or self._give_up_at, max(self._give_up_at, now + _SOON))

    def _pause(self) -> None:
        """Waits for a change, the next settle time or the next rescan."""
        times = (self._next_look, self._observation.refresh_at)
        due = min([self._next_rescan, *(at for at in times if at is not None)])
        with self._condition:
            self._condition.wait_for(lambda: self._dirty or self._stopping, max(0.0, due - time.monotonic()))
            if self._dirty and not self._stopping:
                self._condition.wait_for(lambda: self._stopping, _DEBOUNCE_SECONDS)
