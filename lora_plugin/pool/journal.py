"""What the pool did: the orders not yet sent, and the totals for the metrics."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Any

from lora_plugin.errors import Code
from lora_plugin.pool.entry import Entry
from lora_plugin.pool.orders import Drop, Forget, Load, Order, Orders


class Cause(StrEnum):
    """Why an adapter lost its place; metrics label."""

    DEVICE_ROOM = "device-room"
    """another adapter needed its rows; the host copy stays"""
    HOST_ROOM = "host-room"
    """another adapter needed its host memory"""
    OPERATOR = "operator"
    RETIRED = "retired"
    RESET = "reset"
    """the device's memory was given up; the host copy stays"""
    BASE = "base"
    """the base model's weights, which it was made of, were replaced"""


class Journal:
    """Orders in the sequence in which they were decided, and what they add up to."""

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.loads = 0
        self.evictions: Counter[Cause] = Counter()
        self.failures: Counter[Code] = Counter()
        self._pending: list[Order] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def load(self, entry: Entry, first_row: int) -> None:
        entry.loads += 1
        self.loads += 1
        self._pending.append(Load(entry.adapter_id, first_row))

    def drop(self, adapter_id: int) -> None:
        self._pending.append(Drop(adapter_id))

    def forget(self, adapter_id: int) -> None:
        self._pending.append(Forget(adapter_id))

    def evicted(self, entry: Entry, cause: Cause) -> None:
        entry.evictions += 1
        self.evictions[cause] += 1

    def arrived(self, entry: Entry | None) -> None:
        """A request came: a hit if its adapter was on the device, and not for its sake."""
        if entry is None or entry.extent is None or entry.ahead:
            self.misses += 1
        else:
            entry.hits += 1
            self.hits += 1
        if entry is not None:
            entry.ahead = False

    def take(self) -> Orders:
        """The orders since the last call."""
        orders, self._pending = tuple(self._pending), []
        return orders

    def device_lost(self) -> None:
        """Orders about the device are void: the workers' device tables are empty."""
        self._pending = [order for order in self._pending if isinstance(order, Forget)]

    def totals(self) -> dict[str, Any]:
        return {
            "hits": self.hits,
            "misses": self.misses,
            "loads": self.loads,
            "evictions": {str(cause): self.evictions[cause] for cause in Cause},
            "failures": {str(code): count for code, count in self.failures.items()},
        }
