from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from memory_operations import MemoryOperations, listed

from lora_plugin.admin.bridge import LoopBridge
from lora_plugin.admin.models import AdapterView
from lora_plugin.errors import AdapterNotFound, Code, Unavailable


class SlowOperations(MemoryOperations):
    """Records the thread it ran on; `pin` never ends by itself."""

    def __init__(self) -> None:
        super().__init__(listed("sql"))
        self.threads: set[int] = set()
        self.cancelled = threading.Event()

    async def adapters(self) -> list[AdapterView]:
        self.threads.add(threading.get_ident())
        return await super().adapters()

    async def pin(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
def other_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def test_every_operation_crosses(other_loop: asyncio.AbstractEventLoop) -> None:
    operations = MemoryOperations(listed("sql"))
    bridge = LoopBridge(operations, other_loop)
    assert await bridge.adapters() == [operations.views["sql"]]
    assert await bridge.pool() == await operations.pool()
    assert await bridge.ready() is True
    await bridge.pin("sql")
    assert (await bridge.adapter("sql")).pinned is True
    await bridge.unpin("sql")
    await bridge.evict("sql")
    await bridge.unload("sql")
    view = await bridge.adapter("sql")
    assert (view.pinned, view.residency.host, view.state) == (False, 0, "unloaded")


async def test_the_work_runs_on_the_other_thread(other_loop: asyncio.AbstractEventLoop) -> None:
    operations = SlowOperations()
    await LoopBridge(operations, other_loop).adapters()
    assert operations.threads
    assert threading.get_ident() not in operations.threads


async def test_errors_cross_unchanged(other_loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(AdapterNotFound) as caught:
        await LoopBridge(MemoryOperations(), other_loop).adapter("none")
    assert caught.value.code is Code.NOT_FOUND


async def test_a_late_answer_is_unavailable_and_cancelled(other_loop: asyncio.AbstractEventLoop) -> None:
    operations = SlowOperations()
    with pytest.raises(Unavailable, match="did not answer in time") as caught:
        await LoopBridge(operations, other_loop, timeout=0.05).pin("sql")
    assert caught.value.code is Code.NOT_READY
    assert await asyncio.to_thread(operations.cancelled.wait, 5)


async def test_a_blocked_loop_does_not_block_the_caller(other_loop: asyncio.AbstractEventLoop) -> None:
    wake = threading.Event()
    other_loop.call_soon_threadsafe(wake.wait, 30)
    ticks = asyncio.create_task(_ticks())
    with pytest.raises(Unavailable):
        await LoopBridge(MemoryOperations(), other_loop, timeout=0.1).adapters()
    wake.set()
    ticks.cancel()
    assert ticks.done() is False
    with pytest.raises(asyncio.CancelledError):
        await ticks


async def _ticks() -> None:
    started = time.monotonic()
    while time.monotonic() - started < 30:
        await asyncio.sleep(0.01)


@pytest.mark.filterwarnings("error")
async def test_a_closed_loop_is_unavailable() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(Unavailable, match="stopping"):
        await LoopBridge(MemoryOperations(), loop).ready()
