"""Digests of folders, each computed once however many ask at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from lora_plugin.directory.folders import Content, Folders


class Digests:
    """One computation at a time per content; thread-safe. Results are kept by whoever asked."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self._running: dict[tuple[str, str], Future[str]] = {}

    def compute(self, name: str, content: Content) -> str:
        """The digest of the content. Blocks; raises as `Folders.verify`."""
        key = (name, content.fingerprint)
        with self._lock:
            running = self._running.get(key)
            mine = running or self._running.setdefault(key, Future())
        if running is not None:
            return running.result()
        try:
            mine.set_result(self._folders.verify(name, content))
        except BaseException as error:
            mine.set_exception(error)
        finally:
            with self._lock:
                del self._running[key]
        return mine.result()
