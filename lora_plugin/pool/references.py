"""Which unfinished request uses which adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import KeysView


class References:
    """Counts unfinished requests by adapter id; ids need not be known to the pool."""

    def __init__(self) -> None:
        self._adapter_of: dict[str, int] = {}
        self._counts: Counter[int] = Counter()

    def acquire(self, request_id: str, adapter_id: int) -> bool:
        """Whether the request is a new one for this adapter; one that changes adapters moves over."""
        if self._adapter_of.get(request_id) == adapter_id:
            return False
        self.release(request_id)
        self._adapter_of[request_id] = adapter_id
        self._counts[adapter_id] += 1
        return True

    def release(self, request_id: str) -> int | None:
        """The adapter whose last reference this was, else None."""
        adapter_id = self._adapter_of.pop(request_id, None)
        if adapter_id is None:
            return None
        self._counts[adapter_id] -= 1
        if self._counts[adapter_id]:
            return None
        del self._counts[adapter_id]
        return adapter_id

    def count(self, adapter_id: int) -> int:
        return self._counts.get(adapter_id, 0)

    def requests(self, adapter_id: int) -> list[str]:
        """The unfinished requests of an adapter; looks at all requests."""
        return [request for request, adapter in self._adapter_of.items() if adapter == adapter_id]

    def adapters(self) -> KeysView[int]:
        return self._counts.keys()
