"""What the end of a load means: look at the files again, try later, or never as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from lora_plugin.directory.catalog import Catalog
from lora_plugin.errors import AdapterIncomplete, AdapterRejected, Code, LoraPluginError, Reason, Unavailable

_LOOK_AGAIN: Final = frozenset(
    {
        Code.CHANGED,
        Code.INCOMPLETE,
        Code.CONFIG_MISSING,
        Code.WEIGHTS_MISSING,
        Code.UNREADABLE,
        Code.NOT_FOUND,
    }
)
"""The files are not what the catalog saw: it looks again."""
_NOT_THE_CONTENT: Final = frozenset(
    {
        Code.NOT_READY,
        Code.FETCH_FAILED,
        Code.UNLOADED,
        Code.IN_USE,
        Code.PINNED,
        Code.POOL_FULL,
        Code.HOST_CACHE_FULL,
        Code.ID_CLASH,
        Code.BAD_REQUEST,
        Code.FORBIDDEN,
        Code.INTERNAL,
        Code.SETTINGS_INVALID,
        Code.HOST_INCOMPATIBLE,
    }
)
"""The adapter may be good: it is not rejected for these."""


def verdict(reason: Reason) -> LoraPluginError:
    """AdapterIncomplete: look at the files again. Unavailable: later. AdapterRejected: not as they are."""
    if reason.code in _LOOK_AGAIN:
        return AdapterIncomplete.of(reason)
    return (Unavailable if reason.code in _NOT_THE_CONTENT else AdapterRejected).of(reason)


def too_slow(what: str, seconds: float, waits_for: Reason | None) -> Unavailable:
    """The load was not done in time.

    Args:
        what: was to be loaded, in words.
        seconds: the load timeout.
        waits_for: what the engines last said about it.
    """
    return Unavailable(
        Code.NOT_READY,
        f"{what} was not loaded within {seconds:g} seconds",
        found=waits_for.message if waits_for else None,
        hint="try again, or raise LORA_PLUGIN_LOAD_TIMEOUT_SECONDS",
    )


async def look_again(catalog: Catalog, names: Collection[str], settle_seconds: float) -> None:
    """Has the catalog look at these folders, and once more after the settle time where they changed."""
    await asyncio.to_thread(catalog.scan, names)
    if not catalog.pending().isdisjoint(names):
        await asyncio.sleep(settle_seconds)
        await asyncio.to_thread(catalog.scan, names)
