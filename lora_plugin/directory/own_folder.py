"""The plugin's own folder in the watched directory: nothing is read, written or removed through a link."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FOLDER: Final = ".lora_plugin"
INCOMING: Final = "incoming"
"""The folder in it where adapters are written before they are moved into the directory."""
_LOCK_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.02


def find_own_folder(root: Path, *below: str) -> Path:
    """`.lora_plugin` of a watched directory, or a folder in it.

    Raises:
        OSError: there is none, or what lies in its place is a link or a file.
    """
    path = root
    for part in (FOLDER, *below):
        path /= part
        if path.is_symlink():
            # Whoever may write into the directory must not have the server write or remove elsewhere.
            raise OSError(errno.ELOOP, "a link lies in the place of a folder", str(path))
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return path


def make_own_folder(root: Path, *below: str) -> Path:
    """The same, made where it is missing; not the directory, which may be unmounted. Raises OSError."""
    for depth in range(len(below) + 1):
        root.joinpath(FOLDER, *below[:depth]).mkdir(exist_ok=True)
    return find_own_folder(root, *below)


def draft_folder(root: Path, name: str) -> Path:
    """A path for an adapter's folder on its way in or out, which nobody has. Raises OSError."""
    return make_own_folder(root, INCOMING) / f"{name}.{os.getpid()}.{secrets.token_hex(4)}"


def replace_file(root: Path, target: Path, data: bytes) -> None:
    """Puts a file into the watched directory, or replaces it, as a whole. Raises OSError."""
    draft = make_own_folder(root) / f"{target.name}.{secrets.token_hex(8)}.tmp"
    try:
        with draft.open("xb") as file:
            file.write(data)
        draft.replace(target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(root: Path, name: str) -> Iterator[None]:
    """Against the other servers of the directory, by a file in the folder; not for longer than some seconds.

    What is done meanwhile must be whole without it: some network file systems have no locks, and anybody who
    may write into the directory can hold one. Raises OSError.
    """
    # Not to be waited for, should it be a pipe.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(make_own_folder(root) / name, flags, 0o666)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    until = time.monotonic() + _LOCK_SECONDS
    with contextlib.suppress(OSError):
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOOK_SECONDS)
