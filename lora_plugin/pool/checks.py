"""What the pool refuses for good, with the words for it."""

from __future__ import annotations

from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.pool.entry import Entry


def check_identity(entry: Entry, name: str, digest: str) -> None:
    """Raises AdapterRejected (`ID_CLASH`) if the entry is of another name or content."""
    if (entry.name, entry.digest) != (name, digest):
        raise AdapterRejected(
            Code.ID_CLASH,
            f"adapter {name!r} has the id of another one",
            found=f"{entry.name!r}, version {entry.digest[:12]}",
            hint="rename the folder",
        )


def check_size(entry: Entry, nbytes: int, budget: int) -> None:
    """Raises AdapterRejected (`HOST_CACHE_FULL`) if the whole host cache is too small for it."""
    if nbytes > budget:
        raise AdapterRejected(
            Code.HOST_CACHE_FULL,
            f"adapter {entry.name!r} is larger than the host cache",
            expected=f"at most {budget} bytes",
            found=f"{nbytes} bytes",
            hint="raise LORA_PLUGIN_HOST_MEMORY",
        )


def check_rows(entry: Entry, rows: int, slab_rows: int) -> None:
    """Raises AdapterRejected (`RANK_TOO_LARGE`) if it does not fit into a slab."""
    if rows > slab_rows:
        raise AdapterRejected(
            Code.RANK_TOO_LARGE,
            f"the rank of adapter {entry.name!r} is larger than the pool's slabs",
            expected=f"at most {slab_rows}",
            found=str(rows),
            hint="raise --max-lora-rank",
        )
