"""Repositories of the Hub by their own names in requests: the built-in plugin `hub`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lora_plugin.errors import AdapterNotFound, AdapterRejected, Code
from lora_plugin.hooks import hookimpl
from lora_plugin.hooks.types import Source
from lora_plugin.hub.reference import HubReference, is_allowed, repo_of


class HubPlugin:
    """Fetches the adapter `org--name` from `org/name` when it is first asked for; see `Router`.

    Args:
        allow: patterns of the repositories that may be fetched.
        max_bytes: a larger adapter is refused before it is downloaded.
    """

    def __init__(self, allow: Collection[str], max_bytes: int) -> None:
        self._allow = allow
        self._max_bytes = max_bytes

    @hookimpl
    def resolve_source(self, name: str) -> Source | None:
        repo = repo_of(name)
        if repo is None or not is_allowed(repo, self._allow):
            return None
        return _Requested(HubReference(repo=repo), self._max_bytes)


class _Requested:
    def __init__(self, reference: HubReference, max_bytes: int) -> None:
        self._reference = reference
        self._max_bytes = max_bytes

    @property
    def description(self) -> str:
        return f"hub:{self._reference}"

    def fetch(self, destination: Path) -> None:
        # The client of the Hub is heavy, and this plugin is there in every process.
        from lora_plugin.hub.source import HubSource

        try:
            HubSource(self._reference, self._max_bytes).fetch(destination)
        except AdapterRejected as error:
            if error.code is Code.HUB_NOT_FOUND:
                raise AdapterNotFound.of(error.reason) from error
            raise
