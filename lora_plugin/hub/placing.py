"""Fetched folders in the watched directory: put in place whole, kept while their reference is there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from lora_plugin.directory.own_folder import draft_folder, locked
from lora_plugin.hub.origin import FILE, Origin
from lora_plugin.hub.reference import HubReference, read_reference
from lora_plugin.hub.source import HubSource

_LOCK: Final = "hub.lock"


def bring(root: Path, name: str, reference: HubReference, max_bytes: int) -> None:
    """Fetches what `name.hub.yaml` names and puts it into the watched directory.

    Nothing is put where the file says something else by then, where another server was quicker, or where a
    person's folder is.

    Raises:
        AdapterRejected, Unavailable: as `HubSource.fetch`.
        OSError: the directory cannot be written.
    """
    draft = draft_folder(root, name)
    draft.mkdir()
    try:
        HubSource(reference, max_bytes, owner=name).fetch(draft)
        with locked(root, _LOCK):
            if read_reference(root, name) == reference and wants(root / name, reference):
                _put(draft, root / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def wants(folder: Path, reference: HubReference) -> bool:
    """Whether the folder is missing, or was fetched for another reference."""
    origin = Origin.of(folder)
    if origin is None:
        return not (folder.exists() or folder.is_symlink())
    return origin.owner != "" and origin.reference != reference


def take_away(root: Path, name: str) -> None:
    """Removes a folder that was fetched for a `.hub.yaml`; leaves any other."""
    folder = root / name
    with locked(root, _LOCK):
        origin = Origin.of(folder)
        if origin is None or not origin.owner or folder.is_symlink():
            return
        gone = draft_folder(root, name)
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _put(draft: Path, folder: Path) -> None:
    if not folder.exists():
        draft.rename(folder)
        return
    # File by file: there is no moment without the folder. The origin comes last: half an update is none.
    files = sorted(draft.iterdir(), key=lambda file: file.name == FILE)
    for stale in {file.name for file in folder.iterdir()} - {file.name for file in files}:
        (folder / stale).unlink()
    for file in files:
        file.replace(folder / file.name)
