"""How far a download is, in the log at a bounded rate; ends one that is larger than it said."""

from __future__ import annotations

import logging
import time
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

from lora_plugin.errors import AdapterRejected, Code

logger = logging.getLogger("lora_plugin")

_LINE_SECONDS = 10.0
_SLACK = 1 << 20
"""What a transfer may have more than the file: the Hub's chunked storage counts its own data too."""


class Progress:
    """Of one adapter's files.

    Args:
        title: what is fetched, for the log.
        total: bytes of all files together.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._before = 0
        self._said_at = time.monotonic()

    def done(self, size: int) -> None:
        """A file is there."""
        self._before += size

    def bar(self, size: int) -> type[tqdm]:
        """The class that the Hub's client counts a file of `size` bytes with."""
        progress = self

        class Bar(tqdm):
            def __init__(self, *args: Any, **options: Any) -> None:
                self._came = 0
                super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

            def update(self, n: float | None = 1) -> bool | None:
                self._came += int(n or 0)
                progress._note(self._came, size)
                return None

        return Bar

    def _note(self, came: int, size: int) -> None:
        if came > size + _SLACK:
            raise AdapterRejected(
                Code.TOO_LARGE,
                f"{self._title} sends more than it announced",
                expected=f"{size} bytes",
                found=f"more than {came}",
            )
        now = time.monotonic()
        if now - self._said_at >= _LINE_SECONDS:
            self._said_at = now
            logger.info(
                "fetching %s: %d of %d MB",
                self._title,
                (self._before + came) >> 20,
                max(1, self._total >> 20),
            )
