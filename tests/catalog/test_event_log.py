"""The event log: order, bounds, and subscribers that misbehave."""

from __future__ import annotations

import threading

from lora_plugin.directory.events import Event, EventKind, EventLog


def test_subscribers_hear_everything_in_order() -> None:
    log, heard = EventLog(), list[Event]()
    log.record(EventKind.DISCOVERED, "early", time=1.0)
    log.deliver()
    unsubscribe = log.subscribe(heard.append)
    events = [log.record(EventKind.LISTED, name, time=2.0) for name in "abc"]
    assert heard == []
    log.deliver()
    assert heard == events
    unsubscribe()
    log.record(EventKind.RETIRED, "a", time=3.0)
    log.deliver()
    assert heard == events


def test_a_failing_subscriber_harms_nobody() -> None:
    log, heard = EventLog(), list[Event]()

    def fail(event: Event) -> None:
        raise RuntimeError(event.name)

    log.subscribe(fail)
    log.subscribe(heard.append)
    log.record(EventKind.LISTED, "a", time=1.0)
    log.deliver()
    assert [event.name for event in heard] == ["a"]


def test_a_subscriber_may_record_and_deliver() -> None:
    log, heard = EventLog(), list[str]()

    def follow(event: Event) -> None:
        heard.append(event.name)
        if event.name == "a":
            log.record(EventKind.LISTED, "b", time=1.0)
            log.deliver()
            heard.append("end of a")

    log.subscribe(follow)
    log.record(EventKind.LISTED, "a", time=1.0)
    log.deliver()
    assert heard == ["a", "end of a", "b"]


def test_the_log_is_bounded() -> None:
    log = EventLog(capacity=3)
    for number in range(10):
        log.record(EventKind.LISTED, str(number), time=1.0)
    assert [event.name for event in log.since()] == ["7", "8", "9"]
    assert [event.seq for event in log.since(9)] == [10]


def test_threads_deliver_each_event_once_in_order() -> None:
    log, heard = EventLog(), list[int]()
    log.subscribe(lambda event: heard.append(event.seq))

    def write() -> None:
        for _ in range(200):
            log.record(EventKind.LISTED, "a", time=1.0)
            log.deliver()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.deliver()
    assert heard == list(range(1, 801))
