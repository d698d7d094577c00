"""What the operator decided, kept in a small file in the watched directory that every API server watches."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_plugin.adapter.files import open_plain
from lora_plugin.directory.own_folder import FOLDER, find_own_folder, locked, replace_file

logger = logging.getLogger("lora_plugin")

_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Decisions:
    """The content of the state file.

    Attributes:
        unloaded: adapter name -> fingerprint of the files that are not to be served.
        pinned: names of adapters to keep loaded.
        other: keys of a newer version of the plugin, kept as they are.
    """

    unloaded: Mapping[str, str] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()
    other: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes) -> Decisions:
        """Raises ValueError for anything that is not a state file."""
        raw = json.loads(data)
        unloaded, pinned = raw.pop("unloaded", {}), raw.pop("pinned", [])
        texts = [*unloaded.keys(), *unloaded.values(), *pinned]
        if not isinstance(pinned, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("names and fingerprints must be strings")
        return cls(unloaded, frozenset(pinned), raw)

    def dump(self) -> bytes:
        content = {**self.other, "unloaded": dict(self.unloaded), "pinned": sorted(self.pinned)}
        return json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"

    def differing(self, other: Decisions) -> set[str]:
        """Names about which the two disagree."""
        names = self.unloaded.keys() | other.unloaded.keys()
        changed = {name for name in names if self.unloaded.get(name) != other.unloaded.get(name)}
        return changed | (self.pinned ^ other.pinned)


class State:
    """`.lora_plugin/state.json` of a directory; thread-safe.

    A missing or damaged file counts as empty. Where the directory cannot be written, decisions hold in this
    process only; both are said once.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / FOLDER / "state.json"
        self._lock = threading.RLock()
        self._decisions = Decisions()
        self._stamp: tuple[int, ...] | None = None
        self._unreported: set[str] = set()
        self._memory_only = False
        self._unreadable = False

    @property
    def unloaded(self) -> Mapping[str, str]:
        return self._decisions.unloaded

    @property
    def pinned(self) -> frozenset[str]:
        return self._decisions.pinned

    def reload(self) -> set[str]:
        """Reads the file if it changed; returns the names about which something else is decided now.

        Where it cannot be read, what is decided stays; the next call tries again.
        """
        with self._lock:
            if self._memory_only:
                return set()
            try:
                stamp = self._stat()
                if stamp != self._stamp:
                    self._take(self._read())
                    self._stamp = stamp
                self._unreadable = False
            except OSError as error:
                self._say_unreadable(error)
            changed, self._unreported = self._unreported, set()
            return changed

    def unload(self, name: str, fingerprint: str) -> None:
        """Not to be served as long as its files have this fingerprint."""
        self._change(lambda now: replace(now, unloaded={**now.unloaded, name: fingerprint}))

    def restore(self, name: str) -> None:
        """The inverse of `unload`."""
        if name in self.unloaded:
            self._change(
                lambda now: replace(now, unloaded={k: v for k, v in now.unloaded.items() if k != name})
            )

    def pin(self, name: str) -> None:
        self._change(lambda now: replace(now, pinned=now.pinned | {name}))

    def unpin(self, name: str) -> None:
        self._change(lambda now: replace(now, pinned=now.pinned - {name}))

    def _change(self, change: Callable[[Decisions], Decisions]) -> None:
        with self._lock:
            try:
                with locked(self._root, "lock"):
                    # Other servers may have written since; nothing decided here alone may be lost either.
                    if not self._memory_only:
                        self._take(self._read())
                    self._decisions = change(self._decisions)
                    replace_file(self._root, self._path, self._decisions.dump())
                self._memory_only = False
            except OSError as error:
                self._decisions = change(self._decisions)
                self._say_memory_only(error)

    def _take(self, decisions: Decisions) -> None:
        self._unreported |= self._decisions.differing(decisions)
        self._decisions = decisions

    def _read(self) -> Decisions:
        try:
            # Neither a link is followed, nor a pipe waited for.
            path = find_own_folder(self._root) / self._path.name
            with open_plain(path) as file:
                data = file.read(_MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return Decisions()
        try:
            return Decisions.parse(data)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("The state file %s/state.json counts as empty: %s", FOLDER, error)
            return Decisions()

    def _stat(self) -> tuple[int, ...] | None:
        try:
            stat = self._path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    def _say_unreadable(self, error: OSError) -> None:
        if not self._unreadable:
            self._unreadable = True
            logger.warning(
                "The state file %s/state.json cannot be read (%s): what the operator decided stays as it is",
                FOLDER,
                error.strerror,
            )

    def _say_memory_only(self, error: OSError) -> None:
        if not self._memory_only:
            self._memory_only = True
            logger.warning(
                "Operator decisions are kept in this process only: %s cannot be written (%s)",
                FOLDER,
                error.strerror,
            )
