from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The in-memory operations are the admin tests'.
sys.path.append(str(Path(__file__).parents[1] / "admin"))

from memory_operations import REJECTION, MemoryOperations, listed, rejected

from lora_plugin.admin.app import create_app
from lora_plugin.admin.callers import Tokens
from lora_plugin.admin.server import AdminServer
from lora_plugin.directory.events import EventKind, EventLog
from lora_plugin.errors import Reason

TOKEN = "s3cret"


@pytest.fixture
def operations() -> MemoryOperations:
    forged = Reason(REJECTION.code, "odd\nline \x1b[31m")
    return MemoryOperations(
        listed("sql"), listed("busy", requests=2), rejected("wide"), rejected("zz", forged)
    )


@pytest.fixture
def events() -> EventLog:
    log = EventLog()
    log.record(EventKind.DISCOVERED, "sql", time=1_700_000_000.0)
    log.record(EventKind.LISTED, "sql", time=1_700_000_000.2, version="5f" * 32)
    log.record(EventKind.REJECTED, "wide", time=1_700_000_001.0, reason=REJECTION)
    return log


def _serve(operations: MemoryOperations, token: str | None, events: EventLog) -> Iterator[str]:
    server = AdminServer(lambda: create_app(operations, tokens=Tokens(token), events=events), "127.0.0.1", 0)
    address = server.start()
    assert address is not None
    yield f"http://{address[0]}:{address[1]}"
    server.stop()


@pytest.fixture
def url(operations: MemoryOperations, events: EventLog) -> Iterator[str]:
    yield from _serve(operations, None, events)


@pytest.fixture
def locked_url(operations: MemoryOperations, events: EventLog) -> Iterator[str]:
    yield from _serve(operations, TOKEN, events)
