"""What the catalog asks of the disk: which folders are there, whether they changed, what is in them."""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.names import check_name, is_temporary
from lora_plugin.layout import ModelLayout

logger = logging.getLogger("lora_plugin")

_MAX_ENTRIES = 1000
_MAX_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Content:
    """What a header check found in a whole folder.

    Attributes:
        fingerprint: stands for the files that matter, by their stat data.
        rank: the highest rank of its layers.
        targets: the modules it changes.
        nbytes: bytes of its files.
        packed_bytes: bytes once packed, on one rank of the layout.
        base_model: what its config names as the base model.
        warnings: what is odd about it and does not keep it from being served.
        source: where it was fetched from; None for a folder that a person copied.
        snapshot: the files as they were found; what `Folders.verify` reads.
    """

    fingerprint: str
    rank: int
    targets: tuple[str, ...]
    nbytes: int
    packed_bytes: int
    base_model: str | None
    warnings: tuple[str, ...]
    snapshot: Any
    source: str | None = None


class Folders(Protocol):
    """The watched directory as the catalog sees it; every method may block on the disk."""

    def names(self) -> set[str] | None:
        """The folders that may be adapters; None where the directory cannot be looked into."""
        ...

    def adapter_of(self, entry: str) -> str:
        """The adapter that an entry of the directory belongs to."""
        ...

    def reachable(self) -> bool:
        """Whether the directory itself is there, the same that `names` last saw."""
        ...

    def stamp(self, name: str) -> str | None:
        """Equal as long as nothing in the folder changed, by stat only; None: there is no such folder."""
        ...

    def inspect(self, name: str) -> Content:
        """The header check. Raises AdapterIncomplete or AdapterRejected."""
        ...

    def verify(self, name: str, content: Content) -> str:
        """The digest of what `inspect` found. Raises AdapterIncomplete (CHANGED) if it changed since."""
        ...


class AdapterFolders:
    """The real ones.

    Args:
        root: the watched directory; need not exist.
        layout: the model that the adapters are for.
        taken: names that no adapter may have.
        max_bytes: a larger adapter is refused unread.
    """

    def __init__(self, root: Path, layout: ModelLayout, *, taken: Collection[str], max_bytes: int) -> None:
        self._root = root
        self._layout = layout
        self._taken = frozenset(taken)
        self._max_bytes = max_bytes
        self._device: int | None = None
        self._unreachable = False

    def names(self) -> set[str] | None:
        try:
            device = self._root.stat().st_dev
            with os.scandir(self._root) as entries:
                names = {
                    entry.name
                    for entry in entries
                    if _may_be_shown(entry.name) and not is_temporary(entry.name) and _is_folder(entry)
                }
        except OSError as error:
            self._say_unreachable(error.strerror or str(error))
            return None
        if not names and self._device not in (None, device):
            self._say_unreachable("it is empty and on another device than before: unmounted")
            return None
        self._device = device
        if self._unreachable:
            self._unreachable = False
            logger.info("The adapter directory %s is back", self._root)
        return names

    def adapter_of(self, entry: str) -> str:
        return entry

    def reachable(self) -> bool:
        try:
            found = self._root.stat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and self._device in (None, found.st_dev)

    def stamp(self, name: str) -> str | None:
        if not _may_be_shown(name) or is_temporary(name) or "/" in name:
            return None
        path = self._root / name
        digest = hashlib.blake2b(digest_size=16)
        try:
            found = path.stat()
            if not stat.S_ISDIR(found.st_mode):
                return None
            digest.update(_line("", found))
            for line in itertools.islice(self._lines(path), _MAX_ENTRIES):
                digest.update(line)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return digest.hexdigest()

    def inspect(self, name: str) -> Content:
        check_name(name, self._taken)
        found = inspect(self._root, name, self._layout, self._max_bytes)
        return Content(
            fingerprint=found.snapshot.fingerprint,
            rank=found.rank,
            targets=tuple(found.targets),
            nbytes=found.nbytes,
            packed_bytes=found.packed_nbytes,
            base_model=found.base_model,
            warnings=tuple(found.warnings),
            snapshot=found.snapshot,
        )

    def verify(self, name: str, content: Content) -> str:
        # The reader brings torch with it, which the settings and the command line do without.
        from lora_plugin.adapter.load import verify

        return verify(self._root, name, content.snapshot)

    def _lines(self, path: Path) -> Iterator[bytes]:
        """One line per file; temporary files of a copying tool count, they show that it is at work."""
        if path.is_symlink() and not path.resolve().is_relative_to(self._root.resolve()):
            # Nothing outside the directory is opened: the link itself is all there is to see.
            yield _line(str(path.readlink()), path.lstat())
        else:
            yield from _walk(str(path), _MAX_DEPTH)

    def _say_unreachable(self, why: str) -> None:
        if not self._unreachable:
            self._unreachable = True
            logger.warning(
                "The adapter directory %s cannot be looked into (%s): adapters stay as they are until it can",
                self._root,
                why,
            )


def _may_be_shown(name: str) -> bool:
    """Not so a name that is not UTF-8, or holds control characters: no list or log could carry it."""
    return name.isprintable() and name != ""


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        # A link in a circle is no folder; a folder that cannot be looked at may be one.
        return error.errno != errno.ELOOP


def _walk(path: str, depth: int) -> Iterator[bytes]:
    try:
        with os.scandir(path) as found:
            entries = sorted(found, key=_importance)
    except (FileNotFoundError, NotADirectoryError):
        # Gone, or a file by now; the adapter is there all the same.
        return
    except PermissionError as error:
        yield _unknown(path, error)
        return
    for entry in entries:
        try:
            yield _line(entry.path, entry.stat())
        except OSError as error:
            yield _unknown(entry.path, error)
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, depth - 1)


def _importance(entry: os.DirEntry[str]) -> tuple[bool, bool, str]:
    # The adapter's own files come first: however many others there are, their changes are seen.
    return entry.is_dir(follow_symlinks=False), not entry.name.startswith("adapter_"), entry.name


def _line(name: str, found: os.stat_result) -> bytes:
    # The change time tells of a rewrite that kept size and modification time, as `cp -p` and rsync make.
    values = (found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return os.fsencode(f"{name} {values}\n")


def _unknown(name: str, error: OSError) -> bytes:
    return os.fsencode(f"{name} {error.errno}\n")
