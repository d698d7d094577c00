"""Adapters that somebody asks to have: a folder of the watched directory by its path, or one on the Hub."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from lora_plugin.adapter.names import check_name, is_adapter_name
from lora_plugin.directory.catalog import Catalog
from lora_plugin.directory.entry import Adapter, AdapterState
from lora_plugin.directory.own_folder import FOLDER
from lora_plugin.errors import (
    AdapterNotFound,
    AdapterRejected,
    BadRequest,
    Code,
    LoraPluginError,
    Unavailable,
)
from lora_plugin.hub.origin import Origin
from lora_plugin.hub.reference import SUFFIX, HubReference, is_repo, name_of, read_reference, write_reference
from lora_plugin.readiness.flights import Flights
from lora_plugin.settings import Settings

_LOOK_SECONDS = 0.05
_SETTLING_SECONDS = 1.0
"""How long a request waits for a folder that nobody knew of to be looked at; a copy may take much longer."""
_NOT_SOON = frozenset({Code.HUB_UNREACHABLE, Code.FETCH_FAILED})


class Arrivals:
    """Makes the directory hold what is asked for, and waits until the catalog has looked at it.

    Nothing is kept but what lies in the directory afterwards: a reference to the Hub, or a link.

    Args:
        catalog: of the directory.
        settings: `adapter_dir`, `hub_allow`.
        taken: names that no adapter may have.
    """

    def __init__(self, catalog: Catalog, settings: Settings, taken: Collection[str]) -> None:
        self._catalog = catalog
        self._root = settings.adapter_dir
        self._allow = settings.hub_allow
        self._taken = taken
        self._settling: Flights[None] = Flights()
        self._patience = max(_SETTLING_SECONDS, 3 * settings.settle_seconds)

    async def bring(self, name: str, place: str) -> None:
        """Has the catalog know `name`, which comes from a path or a repository; it may not be whole yet.

        Args:
            name: the adapter's.
            place: the path of a folder in the watched directory, absolute or relative to it, which becomes a
                link where the folder has another name; or org/name of an allowed repository.

        Raises:
            AdapterNotFound: the path leads out of the directory, or to nothing.
            AdapterRejected: NAME_INVALID, NAME_RESERVED, HUB_NOT_ALLOWED.
            BadRequest: another adapter has the name.
            Unavailable: FETCH_FAILED: the directory cannot be written.
        """
        check_name(name, self._taken)
        folder = await asyncio.to_thread(self._find, place)
        if folder is not None:
            await asyncio.to_thread(self._link, name, folder)
        elif is_repo(place):
            await self.refer(name, HubReference(repo=place))
        else:
            raise nowhere(place)

    async def adapter_of(self, place: str) -> str | None:
        """The adapter that `bring` would give one more name; None where the place is nobody's yet."""
        folder = await asyncio.to_thread(self._find, place)
        if folder is None:
            return name_of(place) if is_repo(place) else None
        return folder.name if folder.parent == Path(os.path.realpath(self._root)) else None

    async def refer(self, name: str, reference: HubReference) -> None:
        """Has `name` come from the Hub from now on. Raises as `bring`."""
        check_name(name, self._taken)
        reference.check_allowed(self._allow)
        await asyncio.to_thread(self._refer, name, reference)

    async def settled(self, name: str) -> None:
        """Returns when the catalog has come to a conclusion about the newest content.

        Raises:
            AdapterNotFound: it has gone.
            Unavailable: HUB_UNREACHABLE, FETCH_FAILED: it is tried again later.
        """
        while True:
            adapter = self._catalog.get(name)
            if adapter is None:
                raise AdapterNotFound.named(name)
            reason = adapter.reason
            if reason is not None and reason.code in _NOT_SOON:
                raise Unavailable.of(reason)
            fetching = reason is not None and reason.code is Code.FETCHING
            if not fetching and name not in self._catalog.pending():
                return
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(self._catalog.scan, ())

    async def look(self, name: str) -> None:
        """Has the catalog know what the directory has under a name now, for one that is not served yet.

        Another API server may just have put it there, or taken back an unload: it said 200 for that. Waits
        for a second or so at most.
        """
        adapter = self._catalog.get(name)
        if adapter is not None and not _may_be_ready(adapter):
            return
        if is_adapter_name(name) and await asyncio.to_thread(self._is_there, name):
            await asyncio.to_thread(self._catalog.scan, (name, f"{name}{SUFFIX}"))
            # However many requests wait, one asks again and again: each answer goes over all folders.
            with contextlib.suppress(TimeoutError, LoraPluginError):
                await self._settling.join(name, lambda: self.settled(name), self._patience)

    def _is_there(self, name: str) -> bool:
        return any(os.path.exists(self._root / entry) for entry in (name, f"{name}{SUFFIX}"))  # noqa: PTH110

    def _find(self, place: str) -> Path | None:
        """The real path of a folder in the directory; None for anything else."""
        if not place.isprintable():
            return None
        # By its words first: a path that leads elsewhere is not even looked at.
        path = Path(os.path.normpath(self._root / place))
        real_root = Path(os.path.realpath(self._root))
        if not any(path.is_relative_to(root) and path != root for root in (self._root, real_root)):
            return None
        real = Path(os.path.realpath(path))
        # Where the disk refuses to look (a name too long, no right) there is none; `is_dir` would raise.
        if not real.is_relative_to(real_root) or real == real_root or not os.path.isdir(real):  # noqa: PTH112
            return None
        return None if FOLDER in real.relative_to(real_root).parts else real

    def _link(self, name: str, folder: Path) -> None:
        own = self._root / name
        real_root = Path(os.path.realpath(self._root))
        try:
            if os.path.lexists(own):
                if Path(os.path.realpath(own)) != folder:
                    raise _taken(name)
            else:
                own.symlink_to(folder.relative_to(real_root))
        except OSError as error:
            raise _not_written(error) from error
        self._catalog.scan((name,))

    def _refer(self, name: str, reference: HubReference) -> None:
        if (self._root / name).exists() and Origin.of(self._root / name) is None:
            raise _taken(name)
        try:
            if _present(self._root, name) != reference:
                write_reference(self._root, name, reference)
        except OSError as error:
            raise _not_written(error) from error
        self._catalog.scan((f"{name}{SUFFIX}",))


def _may_be_ready(adapter: Adapter) -> bool:
    """Whether what is known of it may be outdated, or settles within a moment."""
    fetching = adapter.reason is not None and adapter.reason.code is Code.FETCHING
    return fetching or adapter.state in (AdapterState.DISCOVERED, AdapterState.UNLOADED)


def _present(root: Path, name: str) -> HubReference | None:
    try:
        return read_reference(root, name)
    except AdapterRejected:
        return None


def nowhere(place: str) -> AdapterNotFound:
    """What is said of a place that is not in the directory, or that the client is not to know of."""
    return AdapterNotFound(
        Code.NOT_FOUND,
        f"there is no folder {place[:200]!r} in the watched directory",
        expected="a folder in it, or organisation/name of a repository that LORA_PLUGIN_HUB_ALLOW names",
    )


def _taken(name: str) -> BadRequest:
    return BadRequest(
        Code.BAD_REQUEST,
        f"another adapter is named {name!r}",
        hint="choose another name, or remove what lies in the watched directory under this one",
    )


def _not_written(error: OSError) -> Unavailable:
    return Unavailable(
        Code.FETCH_FAILED, "the watched directory cannot be written", found=error.strerror or str(error)
    )
