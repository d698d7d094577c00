"""Who lies where on the device, who is in use, and who has to go.

The promise: with n slabs that hold no pinned adapter, any n unpinned adapters can be in use together,
whatever lies where. Each lies in one slab, so the n-th finds a slab with neither pins nor adapters in use,
which can be emptied. Pins leave at least one such slab. More adapters fit when their extents do.

In use by others for ever, an adapter would never find that slab. So one that has waited too long has rows
set aside (`Turns`): what runs there goes on, nothing new begins there, and then it is this adapter's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from lora_plugin.pool.entry import Entry
from lora_plugin.pool.extents import Extent, ExtentAllocator
from lora_plugin.pool.journal import Cause, Journal
from lora_plugin.pool.turns import Turns

_AHEAD_PER_STEP = 4
"""Running streams wait for all copies of a step, and each takes a search on the thread of the steps."""


class Device:
    """Bookkeeping of the arena. Idle adapters stay until their rows are needed.

    Args:
        extents: the empty arena.
        journal: takes the orders for the workers.
        requests: counts the unfinished requests of an adapter.
    """

    def __init__(
        self, extents: ExtentAllocator, journal: Journal, requests: Callable[[int], int] = lambda _: 0
    ) -> None:
        self.extents = extents
        self.turns = Turns()
        self._journal = journal
        self._requests = requests
        self._at: dict[int, Entry] = {}
        self._in_use: set[int] = set()
        self._pins: dict[int, Entry] = {}
        self._no_room = extents.slab_rows + 1  # rows from which on nothing fits until a use or pin ends
        self._ahead = _AHEAD_PER_STEP  # how many more may be placed ahead before the next step

    def residents(self, slab: int) -> list[Entry]:
        """The adapters of a slab, by address."""
        return [self._at[extent.first_row] for extent in self.extents.taken(slab)]

    @property
    def num_in_use(self) -> int:
        return len(self._in_use)

    def in_use(self, entry: Entry) -> bool:
        return entry.adapter_id in self._in_use

    def begin_step(self, running: Iterable[int], overdue: Iterable[Entry] = ()) -> None:
        """Only the adapters `running`, and pins, are in use now; waiting pins are placed if they can be.

        `overdue` are those that have waited too long for room, in the order of their turns.
        """
        self._in_use = set(running)
        self._ahead = _AHEAD_PER_STEP
        self.turns.renew(overdue, self._easiest)
        self._forget_failures()
        self._place_pins()

    def end_use(self, adapter_id: int) -> None:
        self._in_use.discard(adapter_id)
        self._forget_failures()

    def admit(self, entry: Entry, *, started: bool = False) -> bool:
        """Bring the adapter to the device if need be and mark it in use; False if there is no room.

        What `started` before goes on, whosever turn it is: it may hold what the others wait for.
        """
        if entry.extent is None:
            admitted = self._find_room(entry, started)
        else:
            admitted = started or not self.turns.bars(entry, entry.extent)
        if admitted:
            self._in_use.add(entry.adapter_id)
        return admitted

    def place_ahead(self, entry: Entry, busy: Callable[[Entry], bool]) -> None:
        """Bring an adapter to the device before its request is there, unless something `busy` is next to go.

        A step that only copies keeps running streams waiting for less long than one that also computes the
        request's prompt. A few before each step, and none once there was no room.
        """
        if entry.extent is not None or entry.pinned or not self._ahead:
            return
        extent = self._cheapest(entry, range(self.extents.slabs), started=False)
        if extent is None or any(map(busy, self._lying(self.extents.in_the_way(extent)))):
            self._ahead = 0
            return
        self._ahead -= 1
        self._put(entry, extent)
        entry.ahead = True

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
        if entry.extent is not None:
            self.turns.placed(entry, entry.extent)
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
        entry = self._at.pop(extent.first_row)
        entry.extent, entry.ahead = None, False
        self.extents.free(extent)

    def _stays(self, entry: Entry) -> bool:
        return entry.pinned or entry.adapter_id in self._in_use

    def _find_room(self, entry: Entry, started: bool) -> bool:
        if started:
            return self._place_anywhere(entry, started)
        # Hundreds of requests may wait for room in one step: a search that failed is not repeated.
        if entry.rows < self._no_room:
            if self._place_anywhere(entry):
                return True
            self._no_room = entry.rows
            return False
        # But that search may have been another's, whom the rows set aside for this one are barred to.
        own = self.turns.rows(entry)
        return own is not None and self._place(entry, (self.extents.slab_of(own),))

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

    def _place_anywhere(self, entry: Entry, started: bool = False) -> bool:
        if entry.pinned:
            pinned, _ = self._pinned_slabs()
            if self._place(entry, sorted(pinned), started):
                return True
        return self._place(entry, range(self.extents.slabs), started)

    def _place(self, entry: Entry, slabs: Collection[int], started: bool = False) -> bool:
        """Load (or move) the adapter to the cheapest place in these slabs, evicting what lies there."""
        extent = self._cheapest(entry, slabs, started)
        if extent is not None:
            self._put(entry, extent)
        return extent is not None

    def _put(self, entry: Entry, extent: Extent) -> None:
        for victim in self._lying(self.extents.in_the_way(extent)):
            self.drop(victim)
            self._journal.evicted(victim, Cause.DEVICE_ROOM)
        self.drop(entry)
        entry.extent = self.extents.allocate_at(extent.first_row, extent.rows)
        self._at[extent.first_row] = entry
        self.turns.placed(entry, extent)
        self._journal.load(entry, extent.first_row)

    def _cheapest(self, entry: Entry, slabs: Collection[int], started: bool) -> Extent | None:
        """A free place, else where the latest use is oldest and the fewest go."""
        best: Extent | None = None
        best_cost = (0, 0)
        for extent, victims in self._places(entry, slabs):
            if any(map(self._stays, victims)) or (not started and self.turns.bars(entry, extent)):
                continue
            if not victims:
                return extent
            cost = (max(victim.last_used for victim in victims), len(victims))
            if best is None or cost < best_cost:
                best, best_cost = extent, cost
        return best

    def _easiest(self, entry: Entry) -> Extent | None:
        """Where the fewest unfinished requests are in the way of an adapter whose turn it is."""
        if entry.extent is not None:
            return None if self.turns.bars(entry, entry.extent) else entry.extent
        best: Extent | None = None
        best_cost = 0
        for extent, victims in self._places(entry, range(self.extents.slabs)):
            if any(victim.pinned for victim in victims) or self.turns.bars(entry, extent):
                continue
            cost = sum(self._requests(victim.adapter_id) for victim in victims if self.in_use(victim))
            if best is None or cost < best_cost:
                best, best_cost = extent, cost
        return best

    def _places(self, entry: Entry, slabs: Collection[int]) -> Iterator[tuple[Extent, list[Entry]]]:
        """The places worth considering, with what lies there; what is set aside for it is the first."""
        own = self.turns.rows(entry)
        if own is not None and self.extents.slab_of(own) in slabs:
            yield own, self._lying(self.extents.in_the_way(own))
        for first_row, in_the_way in self.extents.windows(entry.rows, slabs):
            yield Extent(first_row, entry.rows), self._lying(in_the_way)

    def _lying(self, extents: Iterable[Extent]) -> list[Entry]:
        return [self._at[extent.first_row] for extent in extents]
