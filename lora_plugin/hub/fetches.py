"""Fetches under way, two at a time on threads of their own, and how each one ended."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from lora_plugin.errors import AdapterIncomplete, AdapterRejected, Code, LoraPluginError
from lora_plugin.hub.reference import HubReference

logger = logging.getLogger("lora_plugin")

_THREADS = 2
_FIRST_PAUSE = 10.0
_LAST_PAUSE = 300.0

Bring = Callable[[str, HubReference], None]


@dataclass(slots=True)
class _Fetch:
    """One adapter's.

    Attributes:
        reference: what is fetched.
        attempt: 1, 2, 3...
        error: why it ended; None while it is under way.
        told: whether somebody asked since it ended.
        again_at: monotonic seconds: when it is tried again; None: only when asked to.
    """

    reference: HubReference
    attempt: int
    error: LoraPluginError | None = None
    told: bool = False
    again_at: float | None = None


class Fetches:
    """Thread-safe.

    Args:
        bring: fetches a reference into the folder of a name; blocks.
        clock: monotonic seconds.
    """

    def __init__(self, bring: Bring, clock: Callable[[], float]) -> None:
        self._bring = bring
        self._clock = clock
        self._lock = threading.Lock()
        self._fetches: dict[str, _Fetch] = {}
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads = 0

    def stamp(self, name: str) -> str:
        """Differs when something is to be said or done about an adapter's fetch."""
        fetch = self._fetches.get(name)
        if fetch is None:
            return ""
        due = fetch.again_at is not None and self._clock() >= fetch.again_at
        return f"{fetch.attempt} {fetch.error is not None} {due}"

    def ask(self, name: str, reference: HubReference) -> NoReturn:
        """Says how the fetch stands; starts it where there is none, or its end was told before.

        Raises:
            AdapterIncomplete: FETCHING; or why it has to be tried again, which it is by itself.
            AdapterRejected: why it cannot be fetched.
        """
        with self._lock:
            fetch = self._fetches.get(name)
            if fetch is None or fetch.reference != reference or fetch.told:
                attempt = fetch.attempt + 1 if fetch and fetch.reference == reference else 1
                fetch = self._start(name, _Fetch(reference, attempt))
            fetch.told = fetch.error is not None
        if fetch.error is not None:
            raise fetch.error
        raise AdapterIncomplete(Code.FETCHING, f"{reference} is being fetched from the Hub")

    def forget(self, name: str) -> None:
        """Its reference is gone."""
        with self._lock:
            self._fetches.pop(name, None)

    def _start(self, name: str, fetch: _Fetch) -> _Fetch:
        self._fetches[name] = fetch
        self._queue.put(name)
        if self._threads < _THREADS:
            self._threads += 1
            # Daemons: a download must not keep a server that ends.
            threading.Thread(target=self._work, name="lora-plugin-hub", daemon=True).start()
        return fetch

    def _work(self) -> None:
        while True:
            name = self._queue.get()
            fetch = self._fetches.get(name)
            if fetch is not None and fetch.error is None:
                self._end(name, fetch, self._run(name, fetch.reference))

    def _run(self, name: str, reference: HubReference) -> LoraPluginError | None:
        logger.info("adapter %r: fetching %s", name, reference)
        try:
            self._bring(name, reference)
        except AdapterRejected as error:
            return error
        except LoraPluginError as error:
            return AdapterIncomplete.of(error.reason)
        except OSError as error:
            return AdapterIncomplete(
                Code.FETCH_FAILED, f"{reference} cannot be kept here", found=error.strerror
            )
        except Exception as error:
            logger.exception("adapter %r: fetching %s failed unexpectedly", name, reference)
            return AdapterRejected(
                Code.INTERNAL, f"{reference} cannot be fetched", found=type(error).__name__
            )
        return None

    def _end(self, name: str, fetch: _Fetch, error: LoraPluginError | None) -> None:
        with self._lock:
            if self._fetches.get(name) is not fetch:
                return
            if error is None:
                del self._fetches[name]
                return
            if isinstance(error, AdapterIncomplete):
                pause = min(_FIRST_PAUSE * 2 ** min(fetch.attempt - 1, 10), _LAST_PAUSE)
                fetch.again_at = self._clock() + pause
                logger.warning("adapter %r: %s; tried again in %g s", name, error, pause)
            fetch.error = error
