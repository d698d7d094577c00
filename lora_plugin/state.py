"""What the operator decided, kept in a small file in the watched directory that every API server watches."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

logger = logging.getLogger("lora_plugin")

FOLDER = ".lora_plugin"
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
        self._path = root / FOLDER / "state.json"
        self._lock = threading.RLock()
        self._decisions = Decisions()
        self._stamp: tuple[int, ...] | None = None
        self._unreported: set[str] = set()
        self._memory_only = False

    @property
    def unloaded(self) -> Mapping[str, str]:
        return self._decisions.unloaded

    @property
    def pinned(self) -> frozenset[str]:
        return self._decisions.pinned

    def reload(self) -> set[str]:
        """Reads the file if it changed; returns the names about which something else is decided now."""
        with self._lock:
            if self._memory_only:
                return set()
            stamp = self._stat()
            if stamp != self._stamp:
                self._stamp = stamp
                self._take(self._read())
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
                self._path.parent.mkdir(exist_ok=True)
                with self._exclusive():
                    # Other servers may have written since; nothing decided here alone may be lost either.
                    if not self._memory_only:
                        self._take(self._read())
                    self._decisions = change(self._decisions)
                    self._write(self._decisions)
                self._memory_only = False
            except OSError as error:
                self._decisions = change(self._decisions)
                self._say_memory_only(error)

    def _take(self, decisions: Decisions) -> None:
        self._unreported |= self._decisions.differing(decisions)
        self._decisions = decisions

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with (self._path.parent / "lock").open("a") as lock:
            # Some network file systems have no locks: the replace below is atomic all the same.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, decisions: Decisions) -> None:
        draft = self._path.with_name(f"state.json.{os.getpid()}.tmp")
        draft.write_bytes(decisions.dump())
        draft.replace(self._path)

    def _read(self) -> Decisions:
        try:
            with self._path.open("rb") as file:
                return Decisions.parse(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return Decisions()
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("The state file %s/state.json counts as empty: %s", FOLDER, error)
            return Decisions()

    def _stat(self) -> tuple[int, ...] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    def _say_memory_only(self, error: OSError) -> None:
        if not self._memory_only:
            self._memory_only = True
            logger.warning(
                "Operator decisions are kept in this process only: %s cannot be written (%s)",
                FOLDER,
                error.strerror,
            )
