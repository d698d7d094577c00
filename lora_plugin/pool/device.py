"""Who lies where on the device, who is in use, and who has to go.

The promise: with n slabs that hold no pinned adapter, any n unpinned adapters can be in use together,
whatever lies where. Each lies in one slab, so the n-th finds a slab with neither pins nor adapters in use,
which can be emptied. Pins leave at least one such slab. More adapters fit when their extents do.
"""

from __future__ import annotations

from collections.abc import Iterable

from lora_plugin.pool.entry import Entry
from lora_plugin.pool.extents import Extent, ExtentAllocator
from lora_plugin.pool.journal import Cause, Journal


class Device:
    """Bookkeeping of the arena. Idle adapters stay until their rows are needed.

    Args:
        extents: the empty arena.
        journal: takes the orders for the workers.
    """

    def __init__(self, extents: ExtentAllocator, journal: Journal) -> None:
        self.extents = extents
        self._journal = journal
        self._at: dict[int, Entry] = {}
        self._in_use: set[int] = set()
        self._pins: dict[int, Entry] = {}
        self._no_room = extents.slab_rows + 1  # rows from which on nothing fits until a use or pin ends

    def residents(self, slab: int) -> list[Entry]:
        """The adapters of a slab, by address."""
        return [self._at[extent.first_row] for extent in self.extents.taken(slab)]

    def in_use(self, entry: Entry) -> bool:
        return entry.adapter_id in self._in_use

    def begin_step(self, running: Iterable[int]) -> None:
        """Only these adapters, and pins, are in use now; waiting pins are placed if they can be."""
        self._in_use = set(running)
        self._forget_failures()
        self._place_pins()

    def end_use(self, adapter_id: int) -> None:
        self._in_use.discard(adapter_id)
        self._forget_failures()

    def admit(self, entry: Entry) -> bool:
        """Bring the adapter to the device if need be and mark it in use; False if there is no room."""
        if entry.extent is None and not self._find_room(entry):
            return False
        self._in_use.add(entry.adapter_id)
        return True

    def drop(self, entry: Entry) -> None:
        """Take the adapter off the device; fine if it is not there."""
        if entry.extent is not None:
            self._vacate(entry.extent)
            self._journal.drop(entry.adapter_id)

    def pin(self, entry: Entry) -> bool:
        """Keep the adapter on the device from now on; False if no slab would be left without pins.

        Pins are packed into as few slabs as can be: an idle adapter moves to where others are pinned. One
        that finds no room now, because of adapters in use, is placed by a later step; till then it counts
        as a slab.
        """
        pinned, spare = self._pinned_slabs()
        here = entry.extent is not None and self.extents.slab_of(entry.extent) in pinned
        moved = not here and not self.in_use(entry) and self._place(entry, sorted(pinned))
        if not (here or moved or spare > 0):
            return False
        entry.pinned = True
        self._pins[entry.adapter_id] = entry
        self._place_pins()
        return True

    def unpin(self, entry: Entry) -> None:
        entry.pinned = False
        self._pins.pop(entry.adapter_id, None)
        self._forget_failures()

    def reset(self) -> None:
        """The device lost its content: idle adapters leave, those in use and pins are loaded again.

        The latter keep their rows: packed anew, in another order, they might not all fit.
        """
        self._journal.device_lost()
        for entry in list(self._at.values()):
            if entry.extent is not None and not self._stays(entry):
                self._vacate(entry.extent)
                self._journal.evicted(entry, Cause.RESET)
        for first_row, entry in self._at.items():
            self._journal.load(entry, first_row)

    def _vacate(self, extent: Extent) -> None:
        self._at.pop(extent.first_row).extent = None
        self.extents.free(extent)

    def _stays(self, entry: Entry) -> bool:
        return entry.pinned or entry.adapter_id in self._in_use

    def _find_room(self, entry: Entry) -> bool:
        # Hundreds of requests may wait for room in one step: a search that failed is not repeated.
        if entry.rows >= self._no_room:
            return False
        if self._place_anywhere(entry):
            return True
        self._no_room = entry.rows
        return False

    def _forget_failures(self) -> None:
        self._no_room = self.extents.slab_rows + 1

    def _pinned_slabs(self) -> tuple[set[int], int]:
        """The slabs that hold pins, and how many more may get some."""
        pinned = {self.extents.slab_of(e.extent) for e in self._pins.values() if e.extent is not None}
        waiting = sum(entry.extent is None for entry in self._pins.values())
        return pinned, self.extents.slabs - 1 - len(pinned) - waiting

    def _place_pins(self) -> None:
        for entry in self._pins.values():
            if entry.extent is None:
                self._place_anywhere(entry)

    def _place_anywhere(self, entry: Entry) -> bool:
        if entry.pinned:
            pinned, _ = self._pinned_slabs()
            if self._place(entry, sorted(pinned)):
                return True
        return self._place(entry, range(self.extents.slabs))

    def _place(self, entry: Entry, slabs: Iterable[int]) -> bool:
        """Load (or move) the adapter to the cheapest place in these slabs, evicting what lies there."""
        place = self._cheapest(entry.rows, slabs)
        if place is None:
            return False
        first_row, victims = place
        for victim in victims:
            self.drop(victim)
            self._journal.evicted(victim, Cause.DEVICE_ROOM)
        self.drop(entry)
        entry.extent = self.extents.allocate_at(first_row, entry.rows)
        self._at[first_row] = entry
        self._journal.load(entry, first_row)
        return True

    def _cheapest(self, rows: int, slabs: Iterable[int]) -> tuple[int, list[Entry]] | None:
        """First row and victims: a free place, else where the latest use is oldest and the fewest go."""
        best: tuple[int, list[Entry]] | None = None
        best_cost = (0, 0)
        for first_row, in_the_way in self.extents.windows(rows, slabs):
            victims = [self._at[extent.first_row] for extent in in_the_way]
            if not victims:
                return first_row, victims
            if any(map(self._stays, victims)):
                continue
            cost = (max(victim.last_used for victim in victims), len(victims))
            if best is None or cost < best_cost:
                best, best_cost = (first_row, victims), cost
        return best
