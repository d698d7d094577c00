from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp.test_utils import TestClient, TestServer
from memory_operations import MemoryOperations, listed, rejected

from lora_plugin.admin.app import create_app
from lora_plugin.metrics import Metrics


@pytest.fixture
def operations() -> MemoryOperations:
    return MemoryOperations(listed("sql"), listed("busy", requests=2), rejected("wide"))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def client(operations: MemoryOperations, metrics: Metrics) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(create_app(operations, metrics=metrics))) as client:
        yield client
