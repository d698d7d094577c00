from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from aiohttp import web
from memory_operations import MemoryOperations, listed

from lora_plugin.admin import connections
from lora_plugin.admin.app import create_app
from lora_plugin.admin.bridge import LoopBridge
from lora_plugin.admin.server import AdminServer


def _get(address: tuple[str, int], path: str) -> tuple[int, dict[str, object]]:
    try:
        with urlopen(f"http://{address[0]}:{address[1]}{path}", timeout=10) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        return error.code, json.load(error)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "lora-plugin-admin"]


def test_serves_on_a_thread_of_its_own_until_stopped() -> None:
    server = AdminServer(lambda: create_app(MemoryOperations(listed("sql"))), "127.0.0.1", 0)
    address = server.start()
    assert address is not None
    assert address[0] == "127.0.0.1"
    assert _get(address, "/health") == (200, {"status": "ok"})
    assert _get(address, "/v1/adapters")[1]["total"] == 1
    server.stop()
    assert _threads() == []
    with pytest.raises(OSError):
        urlopen(f"http://{address[0]}:{address[1]}/health", timeout=5)
    server.stop()


def test_a_taken_port_warns_once_and_serves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = AdminServer(lambda: create_app(MemoryOperations()), "127.0.0.1", port)
        assert server.start() is None
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert str(port) in warnings[0].getMessage()
    assert "LORA_PLUGIN_ADMIN_PORT" in warnings[0].getMessage()
    server.stop()
    assert _threads() == []


def test_an_address_of_another_machine_warns(caplog: pytest.LogCaptureFixture) -> None:
    server = AdminServer(lambda: create_app(MemoryOperations()), "192.0.2.1", 0)
    assert server.start() is None
    assert "192.0.2.1" in caplog.text
    server.stop()


def test_a_faulty_factory_is_not_hidden() -> None:
    def factory() -> web.Application:
        raise ValueError("faulty")

    server = AdminServer(factory, "127.0.0.1", 0)
    with pytest.raises(ValueError, match="faulty"):
        server.start()
    server.stop()


def test_stop_before_start_does_nothing() -> None:
    AdminServer(lambda: create_app(MemoryOperations()), "127.0.0.1", 0).stop()


async def test_operations_of_the_callers_loop_are_served() -> None:
    operations = MemoryOperations(listed("sql"))
    bridge = LoopBridge(operations, asyncio.get_running_loop())
    server = AdminServer(lambda: create_app(bridge), "127.0.0.1", 0)
    address = server.start()
    assert address is not None
    status, page = await asyncio.to_thread(_get, address, "/v1/adapters")
    assert (status, page["total"]) == (200, 1)
    server.stop()


async def test_a_blocked_caller_is_told_of_as_unavailable_and_stop_is_prompt() -> None:
    class Stuck(MemoryOperations):
        async def ready(self) -> bool:
            await asyncio.Event().wait()
            return True

    loop = asyncio.get_running_loop()
    quick = AdminServer(lambda: create_app(LoopBridge(Stuck(), loop, timeout=0.05)), "127.0.0.1", 0)
    address = quick.start()
    assert address is not None
    status, problem = await asyncio.to_thread(_get, address, "/health")
    assert (status, problem["code"]) == (503, "not-ready")
    quick.stop()

    patient = AdminServer(lambda: create_app(LoopBridge(Stuck(), loop, timeout=600)), "127.0.0.1", 0)
    address = patient.start()
    assert address is not None
    with socket.create_connection(address) as waiting:
        waiting.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(0.1)
        patient.stop()
    # The thread is gone although a request was still waiting for the blocked loop.
    assert _threads() == []


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    server = AdminServer(lambda: create_app(MemoryOperations()), "127.0.0.1", 0)
    address = server.start()
    assert address is not None
    try:
        idle = [_connected(address) for _ in range(2)]
        with pytest.raises(OSError):
            _connected(address)
        idle[0].close()
        deadline = time.monotonic() + 10
        while True:
            try:
                _connected(address).close()
                break
            except OSError:
                assert time.monotonic() < deadline
        idle[1].sendall(REQUEST)
        assert idle[1].recv(100).startswith(b"HTTP/1.1 200")
        idle[1].close()
    finally:
        server.stop()


REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def _connected(address: tuple[str, int]) -> socket.socket:
    """A connection that has been answered once, and stays open."""
    connection = socket.create_connection(address, 10)
    connection.sendall(REQUEST)
    if not connection.recv(1000):
        raise ConnectionError
    return connection
