"""A file of the watched directory whose last good content stays until the next good one."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Generic, TypeVar

from lora_plugin.adapter.files import open_plain
from lora_plugin.errors import Code, Reason
from lora_plugin.strict_yaml import MAX_BYTES, read_yaml

logger = logging.getLogger("lora_plugin")

T = TypeVar("T", bound=Sized)
_Stamp = tuple[int, ...] | None


class KeptFile(Generic[T]):
    """Looked at by one thread; `value` and `reason` may be read by any, and are replaced as a whole.

    Args:
        path: the file; need not exist.
        parse: from the YAML document to the value; raises ValueError with one line of words.
        empty: the value where there is no file.
        settle_seconds: quiet time before a changed file is read.
        clock: monotonic seconds.

    Attributes:
        value: of the last good content.
        reason: what is wrong with the present content; None where it is what `value` says.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[object], T],
        empty: T,
        *,
        settle_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.value = empty
        self.reason: Reason | None = None
        self._path = path
        self._parse = parse
        self._empty = empty
        self._settle = settle_seconds
        self._clock = clock
        self._taken: _Stamp = None
        self._seen: _Stamp = None
        self._changed_at = float("-inf")

    @property
    def name(self) -> str:
        return self._path.name

    def look(self, *, at_once: bool = False) -> float | None:
        """Reads the file if it changed and is quiet.

        Args:
            at_once: without the settle time, at the start.

        Returns:
            Seconds until it wants to be looked at again; None: when it changes.
        """
        try:
            stamp = self._stamp()
        except OSError as error:
            self._refuse(f"it cannot be looked at: {error.strerror}")
            return None
        now = self._clock()
        if stamp != self._seen:
            self._seen, self._changed_at = stamp, now
        if stamp == self._taken:
            return None
        wait = 0.0 if at_once else self._changed_at + self._settle - now
        if wait > 0:
            return wait
        self._taken = stamp
        self._take(stamp)
        return None

    def _stamp(self) -> _Stamp:
        try:
            return _stamp(self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            # A directory that is away for a moment takes nothing with it.
            return None if self._path.parent.is_dir() else self._taken

    def _take(self, stamp: _Stamp) -> None:
        if stamp is None:
            self.value, self.reason = self._empty, None
            logger.info("%s is gone", self.name)
            return
        try:
            value = self._parse(read_yaml(self._read(stamp)))
        except OSError as error:
            self._refuse(f"it cannot be read: {error.strerror}")
        except ValueError as error:
            self._refuse(str(error))
        else:
            self.value, self.reason = value, None
            logger.info("%s: %d entries", self.name, len(value))

    def _read(self, stamp: tuple[int, ...]) -> bytes:
        real = Path(os.path.realpath(self._path, strict=True))
        if not real.is_relative_to(os.path.realpath(self._path.parent)):
            raise ValueError("it is a link that leads out of the adapter directory")
        with open_plain(real) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is not a file")
            if found.st_size > MAX_BYTES:
                raise ValueError(f"it has {found.st_size} bytes, more than {MAX_BYTES}")
            data = file.read(MAX_BYTES + 1)
            if _stamp(os.fstat(file.fileno())) != stamp or len(data) != found.st_size:
                # It is being written: looked at again with the next change, or rescan.
                self._taken = ()
                raise ValueError("it changed while it was read")
            return data

    def _refuse(self, message: str) -> None:
        reason = Reason(
            Code.ROUTING_INVALID,
            f"{self.name} cannot be used: {message}",
            hint="correct it; until then the last good content holds",
        )
        if reason != self.reason:
            logger.warning("%s", reason)
        self.reason = reason


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
