"""Where fetched folders are written and checked, before one rename puts them into the watched directory."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_plugin.adapter.config import CONFIG_FILE
from lora_plugin.adapter.names import check_name
from lora_plugin.directory.own_folder import INCOMING, draft_folder, find_own_folder
from lora_plugin.errors import AdapterRejected, Code, Unavailable

logger = logging.getLogger("lora_plugin")

_LOOK_SECONDS = 0.2
_ABANDONED_SECONDS = 3600.0


class Incoming:
    """`.lora_plugin/incoming` of a watched directory; its methods block, and may be called from any thread.

    Args:
        root: the watched directory.
        max_bytes: a folder that becomes larger is given up.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root = root
        self._max_bytes = max_bytes

    def receive(self, name: str, fetch: Callable[[Path], None]) -> int:
        """Has `fetch` write the files into an empty folder, and puts that into the watched directory.

        Where a folder of the name has appeared there meanwhile, that one stays.

        Args:
            name: the adapter's.
            fetch: what it raises is passed on.

        Returns:
            The bytes of the files.

        Raises:
            AdapterRejected: NAME_INVALID; TOO_LARGE.
            Unavailable: FETCH_FAILED: no files came, or something else than plain files, or the directory
                cannot be written.
        """
        check_name(name, ())
        with _writing():
            folder = draft_folder(self._root, name)
            folder.mkdir()
        try:
            with _SizeLimit(folder, self._max_bytes) as limit:
                try:
                    fetch(folder)
                except Exception:
                    limit.check()
                    raise
                nbytes = limit.check()
            _check_plain(folder)
            with _writing():
                self._place(folder, self._root / name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return nbytes

    def clean(self) -> None:
        """Removes what a server that ended left behind: folders in which nothing was written for an hour."""
        try:
            incoming = find_own_folder(self._root, INCOMING)
        except OSError:
            return
        for folder in _entries(incoming):
            if time.time() - _last_write(folder) > _ABANDONED_SECONDS:
                logger.info("removing %s, which a server left behind", folder)
                shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _place(folder: Path, target: Path) -> None:
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _failed("what is fetched cannot be put into the watched directory", error.strerror) from error


class _SizeLimit:
    """While it is entered, removes a folder that becomes too large: whoever writes into it fails."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._exceeded = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lora-plugin-incoming", daemon=True)

    def __enter__(self) -> _SizeLimit:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def check(self) -> int:
        """Its bytes. Raises AdapterRejected (TOO_LARGE) when they are, or were, too many."""
        nbytes = _size(self._folder)
        self._exceeded |= nbytes > self._max_bytes
        if self._exceeded:
            raise AdapterRejected(
                Code.TOO_LARGE,
                "the adapter is larger than what may be fetched",
                expected=f"at most {self._max_bytes} bytes",
                hint="raise LORA_PLUGIN_MAX_ADAPTER_BYTES",
            )
        return nbytes

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            try:
                self.check()
            except AdapterRejected:
                shutil.rmtree(self._folder, ignore_errors=True)
                return


def _check_plain(folder: Path) -> None:
    entries = _entries(folder)
    for entry in entries:
        found = entry.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise _no_adapter(f"{entry.name!r}, which is not a plain file")
    if not any(entry.name == CONFIG_FILE for entry in entries):
        raise _no_adapter(f"no {CONFIG_FILE}")


def _no_adapter(found: str) -> Unavailable:
    return _failed("what was fetched is not an adapter folder", found)


def _failed(message: str, found: str | None) -> Unavailable:
    return Unavailable(Code.FETCH_FAILED, message, found=found)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _size(folder: Path) -> int:
    return sum(found.st_size for found in _files(folder) if not stat.S_ISDIR(found.st_mode))


def _last_write(folder: Path) -> float:
    return max((found.st_mtime for found in _files(folder)), default=0.0)


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Of a folder and all that is in it, however deep; what goes away meanwhile is left out."""
    paths = [str(folder)]
    for path, folders, names in os.walk(folder):
        paths += [str(Path(path) / name) for name in (*folders, *names)]
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield Path(path).lstat()
