"""The identity of a version: a digest of what is in the folder, and the id derived from it."""

from __future__ import annotations

import hashlib
import os
from typing import Final

FIRST_ID: Final = 1 << 20
"""Smaller ids are the host's own: warm-up and static modules."""

_ID_BITS: Final = 62


class ContentDigest:
    """SHA-256 over the canonical config and the weight files in name order, each preceded by its length."""

    def __init__(self, config: bytes) -> None:
        self._hash = hashlib.sha256()
        self.begin(len(config))
        self.update(config)

    def begin(self, size: int) -> None:
        """A file of `size` bytes follows; the length keeps bytes from moving between files unseen."""
        self._hash.update(size.to_bytes(8, "little"))

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """The next bytes of the file."""
        self._hash.update(data)

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        return self._hash.hexdigest()


def adapter_id(name: str, digest: str) -> int:
    """The id of a version, the same in every process: in [2**20, 2**62)."""
    raw = hashlib.sha256(os.fsencode(name) + b"\0" + digest.encode()).digest()
    return FIRST_ID + int.from_bytes(raw[:8], "little") % ((1 << _ID_BITS) - FIRST_ID)
