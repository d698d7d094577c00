"""What happened to adapters, in order: a bounded log with subscribers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from lora_plugin.errors import Reason

logger = logging.getLogger("lora_plugin")


class EventKind(StrEnum):
    """The transitions of an adapter's life."""

    DISCOVERED = "discovered"
    """a folder was seen for the first time"""
    SETTLING = "settling"
    """it is not whole yet; `reason` says what is missing; told once per copy"""
    LISTED = "listed"
    """it is served from now on"""
    UPDATED = "updated"
    """newer content took the old one's place; `version` is the new digest, where it is known"""
    REJECTED = "rejected"
    """it cannot be served; `version` is the one that ends with it, if there was one"""
    UNLOADED = "unloaded"
    """the operator took it away until its files change"""
    RETIRED = "retired"
    """its folder is gone"""
    PINNED = "pinned"
    """the operator wants it kept loaded"""
    UNPINNED = "unpinned"
    """the operator lets it be evicted again"""


@dataclass(frozen=True, slots=True)
class Event:
    """One transition.

    Attributes:
        seq: 1, 2, 3...: the order of all events of this process.
        time: unix seconds.
        kind: what happened.
        name: the adapter.
        version: a digest, where the kind says so and it is known.
        reason: why, for `settling` and `rejected`.
    """

    seq: int
    time: float
    kind: EventKind
    name: str
    version: str | None = None
    reason: Reason | None = None


Subscriber = Callable[[Event], None]


class EventLog:
    """The latest events, and their delivery to subscribers; thread-safe.

    Recording and delivering are apart: a writer records under its own lock and delivers after releasing it.
    Subscribers are called in order, one event at a time, by whichever thread delivers.
    """

    def __init__(self, capacity: int = 1000) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=capacity)
        self._pending: deque[Event] = deque()
        self._subscribers: list[Subscriber] = []
        self._seq = 0
        self._delivering = False

    def record(
        self,
        kind: EventKind,
        name: str,
        *,
        time: float,
        version: str | None = None,
        reason: Reason | None = None,
    ) -> Event:
        """Appends an event; subscribers hear of it with the next `deliver`."""
        with self._lock:
            self._seq += 1
            event = Event(self._seq, time, kind, name, version, reason)
            self._events.append(event)
            self._pending.append(event)
            return event

    def deliver(self) -> None:
        """Tells the subscribers what is pending; a subscriber that raises is logged and the rest told."""
        while (event := self._take()) is not None:
            for subscriber in tuple(self._subscribers):
                try:
                    subscriber(event)
                except Exception:
                    logger.exception("A subscriber failed on the event %s", event)
            with self._lock:
                self._delivering = False

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Calls `subscriber` with every later event; returns what ends that."""
        with self._lock:
            self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            with self._lock:
                if subscriber in self._subscribers:
                    self._subscribers.remove(subscriber)

        return unsubscribe

    def since(self, seq: int = 0) -> list[Event]:
        """The events after `seq` that are still held, oldest first."""
        with self._lock:
            return [event for event in self._events if event.seq > seq]

    @property
    def last(self) -> int:
        """The latest event's `seq`; 0 when nothing happened yet."""
        with self._lock:
            return self._seq

    @property
    def oldest(self) -> int:
        """The `seq` of the oldest event still held, or of the first one to come."""
        with self._lock:
            return self._events[0].seq if self._events else self._seq + 1

    def _take(self) -> Event | None:
        with self._lock:
            if self._delivering or not self._pending:
                return None
            self._delivering = True
            return self._pending.popleft()
