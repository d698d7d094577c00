"""Which files of a folder make up an adapter, and whether they changed. No weight bytes are read."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lora_plugin.adapter.config import CONFIG_FILE
from lora_plugin.adapter.document import show, show_some
from lora_plugin.adapter.files import FileStamp, read_small, reasons
from lora_plugin.adapter.index import INDEX_FILE, MAX_INDEX_BYTES, parse_index
from lora_plugin.adapter.names import is_adapter_name
from lora_plugin.errors import AdapterIncomplete, AdapterNotFound, AdapterRejected, Code, LoraPluginError

WEIGHTS_FILE: Final = "adapter_model.safetensors"
PICKLED: Final = ("adapter_model.bin", "adapter_model.pt")


@dataclass(frozen=True, slots=True)
class FolderSnapshot:
    """The files of an adapter as they were seen at one moment.

    Attributes:
        name: the folder's name.
        config: adapter_config.json.
        weights: the safetensors files, in the order of their names.
        weight_map: tensor name to file name, if there is an index.
        fingerprint: of the stamps of all files that matter; see `fingerprint`.
        inner: the folders in it that hold an adapter too.
    """

    name: str
    config: FileStamp
    weights: tuple[FileStamp, ...]
    weight_map: dict[str, str] | None
    fingerprint: str
    inner: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.config.size + sum(file.size for file in self.weights)


def snapshot(root: Path, name: str, max_bytes: int, *, trusted: bool = False) -> FolderSnapshot:
    """Look at the folder `name` in `root`.

    Args:
        root: the watched directory. No file outside it is opened, whatever links say.
        name: the folder's name.
        max_bytes: the largest sum of sizes that is served.
        trusted: for a path that the operator gave: any name, and links may lead anywhere.

    Raises:
        AdapterNotFound: there is no such folder.
        AdapterIncomplete: CONFIG_MISSING, WEIGHTS_MISSING or INCOMPLETE, while a copy may be in progress.
        AdapterRejected: NAME_INVALID, PATH_ESCAPE, UNREADABLE, TOO_LARGE, WEIGHTS_FORMAT or WEIGHTS_INVALID.
    """
    folder = _Folder.find(root, name, trusted)
    before = folder.fingerprint()
    config = folder.need(CONFIG_FILE, Code.CONFIG_MISSING, folder.deeper)
    weights, weight_map = _weights(folder)
    seen = FolderSnapshot(name, config, weights, weight_map, before, folder.inner())
    if seen.nbytes > max_bytes:
        raise AdapterRejected(
            Code.TOO_LARGE,
            "the adapter's files are too large",
            expected=f"at most {max_bytes} bytes",
            found=f"{seen.nbytes} bytes",
            hint="raise LORA_PLUGIN_MAX_ADAPTER_BYTES",
        )
    return seen


def fingerprint(root: Path, name: str, *, trusted: bool = False) -> str:
    """A digest of the stamps of every file that could matter, for a folder in any state. Raises nothing.

    Two are equal if and only if nothing was written, replaced, added or removed in between; where the
    directory is mounted, by which server and when, does not matter: the operator's `unload` is kept by it.
    """
    try:
        return _Folder.find(root, name, trusted).fingerprint()
    except LoraPluginError as error:
        return str(error.code)


def _weights(folder: _Folder) -> tuple[tuple[FileStamp, ...], dict[str, str] | None]:
    single = folder.stamp(WEIGHTS_FILE)
    if single is not None:
        return (single,), None
    index = folder.stamp(INDEX_FILE)
    if index is None:
        _refuse_pickles(folder)
        raise AdapterIncomplete(
            Code.WEIGHTS_MISSING, "there are no weights yet", expected=f"{WEIGHTS_FILE} or {INDEX_FILE}"
        )
    weight_map = parse_index(read_small(index, MAX_INDEX_BYTES))
    files = sorted(set(weight_map.values()))
    return tuple(folder.need(file, Code.WEIGHTS_MISSING) for file in files), weight_map


def _refuse_pickles(folder: _Folder) -> None:
    for name in PICKLED:
        if folder.stamp(name) is not None:
            raise AdapterRejected(
                Code.WEIGHTS_FORMAT,
                f"{name} is a pickle, which can run code when it is read",
                expected=WEIGHTS_FILE,
                found=name,
                hint="lora-plugin convert makes safetensors of it, or save it with safe_serialization=True",
            )


def _matters(file: str) -> bool:
    return file in (CONFIG_FILE, INDEX_FILE, *PICKLED) or file.endswith(".safetensors")


@dataclass(frozen=True, slots=True)
class _Folder:
    """An adapter's folder by its real path; `within` is the real path that no file may leave."""

    path: Path
    within: Path | None

    @classmethod
    def find(cls, root: Path, name: str, trusted: bool) -> _Folder:
        if not trusted and not is_adapter_name(name):
            raise AdapterRejected(Code.NAME_INVALID, f"{show(name)} is not an adapter name")
        within = None if trusted else Path(os.path.realpath(root))
        with reasons("the folder", root / name):
            path = cls(root, within).resolve(name)
            if path is None or not path.is_dir():
                raise AdapterNotFound(Code.NOT_FOUND, f"there is no folder {show(name)}")
        return cls(path, within)

    def resolve(self, name: str) -> Path | None:
        """The real path of an entry, None without one; PATH_ESCAPE for one that leads out."""
        try:
            real = Path(os.path.realpath(self.path / name, strict=True))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if self.within is not None and not real.is_relative_to(self.within):
            raise AdapterRejected(
                Code.PATH_ESCAPE,
                f"{show(name)} is a link that leads out of the adapter directory",
                hint="copy the files into the directory",
            )
        return real

    def stamp(self, name: str) -> FileStamp | None:
        with reasons(name, self.path / name):
            real = self.resolve(name)
            if real is None:
                return None
            status = real.stat()
        if not stat.S_ISREG(status.st_mode):
            raise AdapterRejected(Code.UNREADABLE, f"{name} is not a regular file")
        return FileStamp.of(name, real, status)

    def need(self, name: str, code: Code, hint: Callable[[], str | None] = lambda: None) -> FileStamp:
        stamp = self.stamp(name)
        if stamp is None:
            raise AdapterIncomplete(code, f"there is no {name} yet", hint=hint())
        return stamp

    def deeper(self) -> str | None:
        """A hint if the adapter lies one folder deeper: a named one of PEFT, or a trainer's checkpoint."""
        names = self.inner()
        return f"move the adapter up from the folder {show_some(names)}" if names else None

    def inner(self) -> tuple[str, ...]:
        """The folders in it with a config of their own, sorted; links are not followed."""
        with reasons("the folder", self.path):
            folders = [
                path for path in sorted(self.path.iterdir()) if not path.is_symlink() and path.is_dir()
            ]
            return tuple(path.name for path in folders if (path / CONFIG_FILE).is_file())

    def fingerprint(self) -> str:
        digest = hashlib.sha256(os.fsencode(self._place(self.path)))
        with reasons("the folder", self.path):
            names = sorted(entry.name for entry in self.path.iterdir() if _matters(entry.name))
        for name in names:
            digest.update(repr((name, self._state(name))).encode())
        return digest.hexdigest()

    def _state(self, name: str) -> object:
        try:
            stamp = self.stamp(name)
        except LoraPluginError as error:
            return error.code
        if stamp is None:
            return None
        # Not the device's number: every mount of a network file system has another.
        return (self._place(stamp.path), stamp.size, stamp.mtime_ns, stamp.ctime_ns, stamp.inode)

    def _place(self, path: Path) -> str:
        return str(path) if self.within is None else os.path.relpath(path, self.within)
