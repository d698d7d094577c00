"""A place on the Hub as a source of an adapter folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from lora_plugin.hub.client import download, look_up
from lora_plugin.hub.origin import Origin
from lora_plugin.hub.reference import HubReference


class HubSource:
    """Fetches a place on the Hub into a folder.

    Args:
        reference: an allowed one.
        max_bytes: a larger adapter is refused before anything is downloaded.
        owner: the adapter whose `.hub.yaml` asks for it; empty: a request does.
    """

    def __init__(self, reference: HubReference, max_bytes: int, *, owner: str = "") -> None:
        self._reference = reference
        self._max_bytes = max_bytes
        self._owner = owner

    def fetch(self, destination: Path) -> None:
        """Writes the files into the empty folder, and where they came from. Blocks.

        The download goes through the Hub's cache, which several servers of a machine share.

        Raises:
            AdapterRejected, Unavailable: as `client.look_up` and `client.download`.
        """
        snapshot = look_up(self._reference, self._max_bytes)
        for name, path in download(snapshot).items():
            shutil.copyfile(path, destination / name)
        origin = Origin(reference=self._reference, commit=snapshot.commit, owner=self._owner)
        origin.write(destination)
