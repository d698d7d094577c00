"""The adapter pool, owned by the scheduler: extents of the arena, host copies, references and pins."""

from lora_plugin.pool.entry import Entry, Host
from lora_plugin.pool.extents import Extent, ExtentAllocator
from lora_plugin.pool.orders import Drop, Forget, Load, Order, Orders
from lora_plugin.pool.pool import AdapterPool

__all__ = [
    "AdapterPool",
    "Drop",
    "Entry",
    "Extent",
    "ExtentAllocator",
    "Forget",
    "Host",
    "Load",
    "Order",
    "Orders",
]
