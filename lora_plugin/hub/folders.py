"""The watched directory with its `name.hub.yaml` files: each is an adapter, fetched when it is looked at."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Self

from lora_plugin.adapter.names import check_name, is_temporary
from lora_plugin.directory.folders import AdapterFolders, Content, Folders
from lora_plugin.errors import AdapterIncomplete, AdapterRejected
from lora_plugin.hub.fetches import Fetches
from lora_plugin.hub.origin import Origin
from lora_plugin.hub.placing import bring, take_away, wants
from lora_plugin.hub.reference import SUFFIX, HubReference, read_reference
from lora_plugin.layout import ModelLayout
from lora_plugin.settings import Settings

_GRACE_SECONDS = 1.0


class HubFolders:
    """`Folders` over others: what a reference names appears as the adapter's folder, and goes with it.

    Args:
        folders: the directory without references.
        root: the watched directory.
        taken: names that no adapter may have.
        allow: patterns of the repositories that may be fetched.
        max_bytes: a larger adapter is refused before it is downloaded.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        folders: Folders,
        root: Path,
        *,
        taken: Collection[str],
        allow: Collection[str],
        max_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._folders = folders
        self._root = root
        self._taken = taken
        self._allow = allow
        self._fetches = Fetches(lambda name, reference: bring(root, name, reference, max_bytes), clock)
        self._clock = clock
        self._referenced: set[str] | None = None
        self._missing: dict[str, float] = {}

    @classmethod
    def from_settings(cls, settings: Settings, layout: ModelLayout, taken: Collection[str]) -> Self:
        """The watched directory of a server, for a model."""
        root, max_bytes = settings.adapter_dir, settings.max_adapter_bytes
        folders = AdapterFolders(root, layout, taken=taken, max_bytes=max_bytes)
        return cls(
            folders, root, taken=taken, allow=settings.hub_allow, max_bytes=max_bytes, clock=time.monotonic
        )

    def names(self) -> set[str] | None:
        found = self._folders.names()
        if found is None:
            return None
        if self._referenced is None:
            # Those whose reference was removed while no server ran.
            self._referenced = {name for name in found if self._was_fetched(name)}
        self._referenced |= self._references()
        return found | self._referenced

    def adapter_of(self, entry: str) -> str:
        if not _is_reference(entry):
            return self._folders.adapter_of(entry)
        name = entry.removesuffix(SUFFIX)
        if self._referenced is not None:
            self._referenced.add(name)
        return name

    def reachable(self) -> bool:
        return self._folders.reachable()

    def stamp(self, name: str) -> str | None:
        if not self._is_referenced(name):
            return self._folders.stamp(name)
        file = self._file_stamp(name)
        if file is not None:
            self._missing.pop(name, None)
            return f"{self._folders.stamp(name)} {file} {self._fetches.stamp(name)}"
        if self._folders.reachable():
            self._miss(name)
        return self._folders.stamp(name)

    def inspect(self, name: str) -> Content:
        reference = self._reference(name)
        if reference is None:
            return self._with_source(name, self._folders.inspect(name))
        folder = self._root / name
        if wants(folder, reference):
            self._fetch(name, reference, served=folder.exists())
        content = self._with_source(name, self._folders.inspect(name))
        if content.source is not None:
            return content
        return replace(
            content,
            warnings=(*content.warnings, f"{name}{SUFFIX} is not followed: the folder was here before"),
        )

    def verify(self, name: str, content: Content) -> str:
        return self._folders.verify(name, content)

    def _references(self) -> set[str]:
        try:
            with os.scandir(self._root) as entries:
                return {entry.name.removesuffix(SUFFIX) for entry in entries if _is_reference(entry.name)}
        except OSError:
            return set()

    def _is_referenced(self, name: str) -> bool:
        return self._referenced is not None and name in self._referenced

    def _was_fetched(self, name: str) -> bool:
        origin = Origin.of(self._root / name)
        return origin is not None and origin.owner != ""

    def _reference(self, name: str) -> HubReference | None:
        if not self._is_referenced(name):
            return None
        check_name(name, self._taken)
        reference = read_reference(self._root, name)
        if reference is not None:
            reference.check_allowed(self._allow)
        return reference

    def _fetch(self, name: str, reference: HubReference, *, served: bool) -> None:
        try:
            self._fetches.ask(name, reference)
        except AdapterRejected as error:
            if served:
                # The content fetched before stays served, as long as there is nothing to replace it.
                raise AdapterIncomplete.of(error.reason) from error
            raise

    def _with_source(self, name: str, content: Content) -> Content:
        origin = Origin.of(self._root / name)
        return content if origin is None else replace(content, source=str(origin))

    def _file_stamp(self, name: str) -> str | None:
        try:
            found = (self._root / f"{name}{SUFFIX}").stat()
        except FileNotFoundError:
            return None
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"

    def _miss(self, name: str) -> None:
        """The reference is gone; only after a while, for an editor may be replacing it."""
        now = self._clock()
        if now - self._missing.setdefault(name, now) < _GRACE_SECONDS:
            return
        del self._missing[name]
        self._fetches.forget(name)
        take_away(self._root, name)
        if self._referenced is not None:
            self._referenced.discard(name)


def _is_reference(entry: str) -> bool:
    return entry.endswith(SUFFIX) and entry.isprintable() and "/" not in entry and not is_temporary(entry)
