"""What the scheduler tells the workers to do with adapters, in plain picklable form.

Every rank executes the same orders in the same sequence, before the step they come with, and decides
nothing itself: so all ranks agree about the arena by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the adapter's host copy to the arena rows from `first_row` on, the same rows in every layer."""

    adapter_id: int
    first_row: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Take the adapter off the device; its rows may be overwritten by a later `Load`."""

    adapter_id: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Take the adapter out of the host cache and give up staging it; unknown ids are fine."""

    adapter_id: int


Order: TypeAlias = Load | Drop | Forget
Orders: TypeAlias = tuple[Order, ...]
