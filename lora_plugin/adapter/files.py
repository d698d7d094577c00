"""Reading the files of an adapter: only regular files, only as they were seen, every failure with its reason.

Weights are read with plain reads, never mapped: a file truncated under a mapping kills the process (SIGBUS).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from lora_plugin.errors import AdapterIncomplete, AdapterRejected, Code

CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What `stat` says of one file of an adapter.

    Attributes:
        name: the file's name in the adapter's folder.
        path: the real path, without symbolic links.
        size: bytes.
        mtime_ns: last change of the content.
        ctime_ns: last change of content or metadata; it also moves when a copy sets the time back.
        inode: with `device`, which file it is.
        device: the file system's number.
    """

    name: str
    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, name: str, path: Path, status: os.stat_result) -> FileStamp:
        return cls(
            name,
            path,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
            status.st_dev,
        )


@contextmanager
def reasons(name: str, path: Path) -> Iterator[None]:
    """Turn an OSError about the file `name` of an adapter into an error of the family.

    Raises:
        AdapterRejected: UNREADABLE, for a missing right.
        AdapterIncomplete: CHANGED, for a file that has gone; UNREADABLE, for a failing file system.
    """
    try:
        yield
    except PermissionError:
        raise AdapterRejected(
            Code.UNREADABLE,
            f"{name} may not be read",
            expected="the right to read files (r) and to enter folders (r-x)",
            found=_rights(path),
            hint="chmod -R a+rX the adapter's folder, or change its owner",
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterIncomplete(Code.CHANGED, f"{name} went away while it was read") from None
    except OSError as error:
        raise AdapterIncomplete(Code.UNREADABLE, f"{name} cannot be read", found=error.strerror) from None


def open_plain(path: Path) -> FileIO:
    """Open for reading what is no link, and no folder; a pipe is not waited for. Raises OSError."""
    # By an opener, the file is the descriptor's owner from the start: a folder's is closed, too.
    return FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))


def open_stamped(stamp: FileStamp) -> FileIO:
    """Open a file that must still be the one that was seen.

    Raises:
        AdapterRejected: UNREADABLE, for a missing right.
        AdapterIncomplete: CHANGED, if it is another file or has other times or another size by now.
    """
    with reasons(stamp.name, stamp.path):
        # The path is real: a link in its place is new.
        file = open_plain(stamp.path)
    if FileStamp.of(stamp.name, stamp.path, os.fstat(file.fileno())) != stamp:
        file.close()
        raise AdapterIncomplete(Code.CHANGED, f"{stamp.name} changed while it was read")
    return file


def read_into(file: FileIO, buffer: memoryview, stamp: FileStamp) -> None:
    """Fill the buffer from the file's position.

    Raises:
        AdapterIncomplete: INCOMPLETE, if the file ends before; UNREADABLE, if the file system fails.
    """
    with reasons(stamp.name, stamp.path):
        while buffer:
            count = file.readinto(buffer[:CHUNK])
            if not count:
                raise AdapterIncomplete(Code.INCOMPLETE, f"{stamp.name} ended while it was read")
            buffer = buffer[count:]


def read_small(stamp: FileStamp, limit: int) -> bytes:
    """The whole content of a small file.

    Raises:
        AdapterRejected: TOO_LARGE, unread, if it has more than `limit` bytes.
        AdapterIncomplete: CHANGED, INCOMPLETE or UNREADABLE.
    """
    if stamp.size > limit:
        raise AdapterRejected(
            Code.TOO_LARGE,
            f"{stamp.name} is too large",
            expected=f"at most {limit} bytes",
            found=f"{stamp.size} bytes",
        )
    data = bytearray(stamp.size)
    with open_stamped(stamp) as file:
        read_into(file, memoryview(data), stamp)
    return bytes(data)


def _rights(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "a folder that may not be entered"
    mode = stat.S_IMODE(status.st_mode)
    return f"mode {mode:04o}, owner {status.st_uid}, while the server runs as user {os.geteuid()}"
