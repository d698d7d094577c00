"""What the engine calls in its workers."""

from __future__ import annotations

import logging
from typing import Any

from lora_plugin.errors import Code, Reason
from lora_plugin.pool.orders import Orders
from lora_plugin.worker.stager import Job

logger = logging.getLogger("lora_plugin")


def layout(worker: Any) -> dict[str, Any]:
    """The model's layout with this rank's shards, as plain data."""
    result: dict[str, Any] = worker.model_runner.lora_manager.layout.to_dict()
    return result


def measure(worker: Any) -> dict[str, Any]:
    """What metrics show of this rank."""
    result: dict[str, Any] = worker.model_runner.lora_manager.measure()
    return result


def explain(worker: Any, adapter_id: int) -> dict[str, Any]:
    """What this rank knows of an adapter."""
    result: dict[str, Any] = worker.model_runner.lora_manager.explain(adapter_id)
    return result


def recover(worker: Any, emptied: bool) -> list[int]:
    """See `WorkerAdapters.recover`."""
    result: list[int] = worker.model_runner.lora_manager.recover(emptied)
    return result


def exchange(worker: Any, orders: Orders, jobs: list[Job], ask: list[int]) -> dict[int, Any]:
    """Execute orders, start jobs, and say how the adapters in `ask` stand.

    Never raises: one rank that did would leave the other ranks' replies unread.
    """
    adapters = worker.model_runner.lora_manager
    try:
        adapters.execute(orders)
        result: dict[int, Any] = adapters.stage(jobs, ask)
    except Exception as error:
        logger.exception("staging failed")
        reason = Reason(Code.INTERNAL, "a worker could not stage", found=f"{type(error).__name__}: {error}")
        return {adapter_id: {"state": "failed", "reason": reason.to_dict()} for adapter_id in ask}
    return result
