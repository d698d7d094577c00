"""The Hub's side: what a repository holds at a commit, and its files on the local disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

from lora_plugin.adapter.config import CONFIG_FILE
from lora_plugin.adapter.document import show
from lora_plugin.adapter.folder import PICKLED, WEIGHTS_FILE
from lora_plugin.adapter.index import INDEX_FILE
from lora_plugin.errors import AdapterRejected, Code, Unavailable
from lora_plugin.hub.failures import family
from lora_plugin.hub.progress import Progress
from lora_plugin.hub.reference import HubReference

T = TypeVar("T")

_TIMEOUT_SECONDS: Final = 10.0
_PAUSES: Final = (1.0, 3.0)
"""Seconds before each further try of something that may work later."""
_WANTED: Final = (CONFIG_FILE, INDEX_FILE, "adapter_model*.safetensors")
_SHARDS: Final = "adapter_model-*.safetensors"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An adapter in a repository at one commit.

    Attributes:
        reference: what was asked for.
        commit: what its revision is.
        files: the adapter's files, by their names within its folder: bytes.
    """

    reference: HubReference
    commit: str
    files: Mapping[str, int]

    def path(self, file: str) -> str:
        """The file's path in the repository."""
        return str(PurePosixPath(self.reference.subfolder or "") / file)


def look_up(reference: HubReference, max_bytes: int) -> Snapshot:
    """The commit and the adapter's files; nothing is downloaded.

    Raises:
        AdapterRejected: HUB_NOT_FOUND, HUB_FORBIDDEN; CONFIG_MISSING, WEIGHTS_MISSING, WEIGHTS_FORMAT for
            what the repository holds; TOO_LARGE.
        Unavailable: HUB_UNREACHABLE.
    """
    found = _again(reference, lambda: _cached(reference) if constants.HF_HUB_OFFLINE else _listed(reference))
    snapshot = Snapshot(reference, found[0], _of_adapter(reference, found[1]))
    total = sum(snapshot.files.values())
    if total > max_bytes:
        raise AdapterRejected(
            Code.TOO_LARGE,
            f"the files of {reference} are too large",
            expected=f"at most {max_bytes} bytes",
            found=f"{total} bytes",
            hint="raise LORA_PLUGIN_MAX_ADAPTER_BYTES",
        )
    return snapshot


def download(snapshot: Snapshot) -> dict[str, Path]:
    """The adapter's files, in the Hub's local cache, by their names.

    Raises:
        AdapterRejected, Unavailable: as `look_up`; FETCH_FAILED for a disk that does not take them.
    """
    progress = Progress(str(snapshot.reference), sum(snapshot.files.values()))
    paths: dict[str, Path] = {}
    for file, size in snapshot.files.items():
        paths[file] = _again(snapshot.reference, partial(_one, snapshot, file, size, progress))
        progress.done(size)
    return paths


def _one(snapshot: Snapshot, file: str, size: int, progress: Progress) -> Path:
    path = Path(
        hf_hub_download(
            snapshot.reference.repo,
            snapshot.path(file),
            revision=snapshot.commit,
            local_files_only=constants.HF_HUB_OFFLINE,
            tqdm_class=progress.bar(size),
        )
    )
    found = path.stat().st_size
    if found != size:
        raise AdapterRejected(
            Code.TOO_LARGE,
            f"{file} of {snapshot.reference} is not of the size that the Hub lists",
            expected=f"{size} bytes",
            found=f"{found} bytes",
        )
    return path


def _listed(reference: HubReference) -> tuple[str, dict[str, int]]:
    info = HfApi().model_info(
        reference.repo, revision=reference.revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
    )
    if info.id != reference.repo:
        # It follows renames, and takes any case: rules about names would be got round.
        raise AdapterRejected(
            Code.HUB_NOT_FOUND,
            f"the Hub has {reference.repo} under another name",
            expected=reference.repo,
            found=show(info.id),
            hint="ask for that name, if it is to be served and LORA_PLUGIN_HUB_ALLOW names it",
        )
    if info.sha is None:
        raise Unavailable(Code.HUB_UNREACHABLE, f"the Hub does not say which commit {reference} is")
    return info.sha, {file.rfilename: _size(file.size) for file in info.siblings or ()}


def _size(size: int | None) -> int:
    if size is None or size < 0:
        raise ValueError("a file without a size")
    return size


def _cached(reference: HubReference) -> tuple[str, dict[str, int]]:
    """What the local cache has of it."""
    wanted = [str(PurePosixPath(reference.subfolder or "") / name) for name in _WANTED]
    folder = Path(
        snapshot_download(
            reference.repo, revision=reference.revision, local_files_only=True, allow_patterns=wanted
        )
    )
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return folder.name, {name: path.stat().st_size for name, path in files.items()}


def _of_adapter(reference: HubReference, files: Mapping[str, int]) -> dict[str, int]:
    """The files to fetch: the config and safetensors, never a pickle."""
    folder = PurePosixPath(reference.subfolder or "")
    here = {p.name: size for path, size in files.items() if (p := PurePosixPath(path)).parent == folder}
    if CONFIG_FILE not in here:
        raise _missing(Code.CONFIG_MISSING, reference, f"no {CONFIG_FILE}", "name its subfolder")
    if WEIGHTS_FILE in here:
        wanted = {WEIGHTS_FILE}
    elif INDEX_FILE in here:
        wanted = {INDEX_FILE, *(name for name in here if PurePosixPath(name).match(_SHARDS))}
    elif any(name in here for name in PICKLED):
        raise _missing(Code.WEIGHTS_FORMAT, reference, "a pickle only", "ask its owner for safetensors")
    else:
        raise _missing(Code.WEIGHTS_MISSING, reference, f"no {WEIGHTS_FILE}", None)
    return {name: here[name] for name in sorted({CONFIG_FILE, *wanted})}


def _missing(code: Code, reference: HubReference, what: str, hint: str | None) -> AdapterRejected:
    return AdapterRejected(code, f"{reference} has {what}", hint=hint)


def _again(reference: HubReference, call: Callable[[], T]) -> T:
    """The call's result, tried again where it may work later."""
    for pause in (*_PAUSES, None):
        try:
            with family(reference):
                return call()
        except Unavailable:
            if pause is None or constants.HF_HUB_OFFLINE:
                raise
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")
