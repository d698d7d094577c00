"""Server-sent events: in order, resumed where they were left, bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from memory_operations import REJECTION, MemoryOperations

from lora_plugin.admin.app import create_app
from lora_plugin.admin.event_stream import EventStream
from lora_plugin.admin.routes import EVENTS
from lora_plugin.directory.events import EventKind, EventLog


@dataclass
class Sent:
    """One event as a client reads it; a comment has neither id nor kind."""

    id: str = ""
    kind: str = ""
    data: str = ""
    comment: str = ""


async def read(response: ClientResponse) -> Sent:
    sent = Sent()
    async with asyncio.timeout(10):
        while line := (await response.content.readline()).decode().rstrip("\n"):
            field, _, value = line.partition(":")
            setattr(sent, {"": "comment", "event": "kind"}.get(field, field), value.removeprefix(" "))
    return sent


def record(log: EventLog, *names: str) -> None:
    for name in names:
        log.record(EventKind.LISTED, name, time=5.0, version="ab" * 32)
    log.deliver()


@pytest.fixture
def log() -> EventLog:
    return EventLog(capacity=4)


@pytest.fixture
async def client(log: EventLog) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(_app(log))) as client:
        yield client


def _app(log: EventLog, **limits: float) -> web.Application:
    app = create_app(MemoryOperations(), events=log)
    app[EVENTS] = EventStream(log, **limits)  # type: ignore[arg-type]
    return app


async def follow(client: TestClient, query: str = "", last: str = "") -> ClientResponse:
    headers = {"Last-Event-ID": last} if last else {}
    response = await client.get(f"/v1/events{query}", headers=headers)
    assert (response.status, response.content_type) == (200, "text/event-stream")
    return response


async def test_events_arrive_as_they_happen(client: TestClient, log: EventLog) -> None:
    record(log, "before")
    response = await follow(client)
    assert response.headers["X-Request-Id"]
    assert (await read(response)).comment == "here"
    record(log, "a")
    log.record(EventKind.REJECTED, "b", time=6.0, reason=REJECTION)
    log.deliver()
    first, second = await read(response), await read(response)
    assert json.loads(first.data) == {
        "id": first.id, "time": 5.0, "kind": "listed", "name": "a", "version": "ab" * 32
    }  # fmt: skip
    assert (first.kind, second.kind) == ("listed", "rejected")
    assert json.loads(second.data)["reason"]["code"] == "rank-too-large"


async def test_a_client_resumes_where_it_was(client: TestClient, log: EventLog) -> None:
    record(log, "a", "b", "c")
    everything = await follow(client, "?after=0")
    await read(everything)
    sent = [await read(everything) for _ in range(3)]
    assert [json.loads(event.data)["name"] for event in sent] == ["a", "b", "c"]
    for resumed in (await follow(client, last=sent[0].id), await follow(client, f"?after={sent[0].id}")):
        assert (await read(resumed)).comment == "here"
        assert [(await read(resumed)).id for _ in range(2)] == [sent[1].id, sent[2].id]


async def test_what_is_no_longer_held_is_said(client: TestClient, log: EventLog) -> None:
    record(log, "a")
    response = await follow(client, "?after=0")
    await read(response)
    first = await read(response)
    response.close()
    record(log, *"bcdefg")
    resumed = await follow(client, last=first.id)
    assert (await read(resumed)).kind == "reset"
    assert [json.loads((await read(resumed)).data)["name"] for _ in range(4)] == list("defg")


async def test_a_slow_listener_is_told_that_it_missed_some(client: TestClient, log: EventLog) -> None:
    response = await follow(client)
    await read(response)
    # More than the log holds, before the listener's turn comes.
    record(log, *"abcdefgh")
    assert (await read(response)).kind == "reset"
    assert json.loads((await read(response)).data)["name"] == "e"


@pytest.mark.parametrize("last", ["00000000-1", "nonsense", "-", "00000000-99999999999999999999"])
async def test_an_id_of_another_process_is_a_new_start(client: TestClient, log: EventLog, last: str) -> None:
    record(log, "a")
    response = await follow(client, last=last)
    assert (await read(response)).kind == "reset"
    assert json.loads((await read(response)).data)["name"] == "a"


async def test_a_future_id_of_this_process_is_a_new_start(client: TestClient, log: EventLog) -> None:
    record(log, "a")
    response = await follow(client, "?after=0")
    await read(response)
    process = (await read(response)).id.partition("-")[0]
    assert (await read(await follow(client, last=f"{process}-7"))).kind == "reset"


async def test_silence_has_a_heartbeat(log: EventLog) -> None:
    async with TestClient(TestServer(_app(log, heartbeat=0.02))) as client:
        response = await follow(client)
        assert [(await read(response)).comment for _ in range(3)] == ["here", "alive", "alive"]


async def test_listeners_are_bounded(log: EventLog) -> None:
    async with TestClient(TestServer(_app(log, max_listeners=2, heartbeat=0.02))) as client:
        listeners = [await follow(client) for _ in range(2)]
        refused = await client.get("/v1/events")
        assert (refused.status, (await refused.json())["code"]) == (429, "too-many-requests")
        assert refused.headers["Retry-After"] == "5"
        listeners[0].close()
        async with asyncio.timeout(10):
            while (again := await client.get("/v1/events")).status == 429:
                await asyncio.sleep(0.02)
        assert again.status == 200


async def test_nothing_stays_behind_of_a_listener(client: TestClient, log: EventLog) -> None:
    response = await follow(client)
    await read(response)
    assert len(log._subscribers) == 1
    response.close()
    async with asyncio.timeout(10):
        while log._subscribers:
            record(log, "a")
            await asyncio.sleep(0.02)


async def test_head_ends_at_once(client: TestClient) -> None:
    async with asyncio.timeout(10):
        assert (await client.head("/v1/events")).status == 200
        assert (await client.get("/health")).status == 200
