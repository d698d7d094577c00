"""The ways in: look at a folder's headers, compute its digest, or read and pack all of it.

Folders are addressed by directory and name, never by a path from a request. With `trusted`, `root / name` is
a path that the operator gave: any name, and links may lead anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from lora_plugin.adapter.checkpoint import TensorInfo, parse_head, read_head
from lora_plugin.adapter.config import MAX_CONFIG_BYTES, AdapterConfig
from lora_plugin.adapter.digest import ContentDigest
from lora_plugin.adapter.document import show
from lora_plugin.adapter.files import CHUNK, FileStamp, open_stamped, read_into, read_small
from lora_plugin.adapter.folder import FolderSnapshot, fingerprint, snapshot
from lora_plugin.adapter.index import check_index
from lora_plugin.adapter.matching import match
from lora_plugin.adapter.pack import PackedAdapter, Packer
from lora_plugin.adapter.plan import Plan
from lora_plugin.errors import AdapterIncomplete, AdapterRejected, Code
from lora_plugin.layout import ModelLayout


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the headers say about an adapter that can be served.

    Attributes:
        snapshot: the files that were looked at.
        config: the checked config.
        plan: where its tensors go.
    """

    snapshot: FolderSnapshot
    config: AdapterConfig
    plan: Plan

    @property
    def rank(self) -> int:
        return self.plan.rank

    @property
    def targets(self) -> tuple[str, ...]:
        return self.plan.targets

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.snapshot.nbytes

    @property
    def packed_nbytes(self) -> int:
        """Bytes in the host cache, on one rank."""
        return self.plan.nbytes

    @property
    def base_model(self) -> str | None:
        return self.config.base_model

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.plan.warnings


def inspect(
    root: Path, name: str, layout: ModelLayout, max_bytes: int, *, trusted: bool = False
) -> Inspection:
    """Check everything that the config and the headers tell; no weights are read.

    Raises:
        AdapterNotFound: there is no such folder.
        AdapterIncomplete: the folder is not whole yet.
        AdapterRejected: it cannot be served.
    """
    seen = snapshot(root, name, max_bytes, trusted=trusted)
    config = _read_config(seen)
    heads = _read_heads(seen)
    return Inspection(seen, config, match(_tensors(seen, heads), layout, config))


def verify(root: Path, name: str, seen: FolderSnapshot, *, trusted: bool = False) -> str:
    """The digest of the content that was looked at, 64 hexadecimal digits.

    Raises:
        AdapterIncomplete: CHANGED, if anything changed since `seen` or while it was read.
        AdapterRejected: the config cannot be read.
    """
    digest = ContentDigest(_read_config(seen).canonical)
    for stamp in seen.weights:
        digest.begin(stamp.size)
        with open_stamped(stamp) as file:
            for chunk in _chunks(file, stamp.size, stamp):
                digest.update(chunk)
    _check_unchanged(root, name, seen, trusted)
    return digest.hexdigest()


def load(
    root: Path,
    name: str,
    layout: ModelLayout,
    expected_digest: str | None,
    max_bytes: int,
    pin: bool = False,
    *,
    trusted: bool = False,
) -> PackedAdapter:
    """Read the whole adapter and pack this rank's part of it.

    Args:
        root: the watched directory.
        name: the folder's name.
        layout: the model, with this rank's shards.
        expected_digest: what `verify` said of the version that is wanted; None for whatever is there.
        max_bytes: a larger adapter is refused unread.
        pin: whether the slab is page-locked.
        trusted: see the module.

    Raises:
        AdapterNotFound: there is no such folder.
        AdapterIncomplete: the folder is not whole, or CHANGED: it holds another version than the one wanted.
        AdapterRejected: it cannot be served.
    """
    seen = snapshot(root, name, max_bytes, trusted=trusted)
    config = _read_config(seen)
    heads = _read_heads(seen)
    plan = match(_tensors(seen, heads), layout, config)
    packer = Packer(plan, layout, pin=pin)
    digest = ContentDigest(config.canonical)
    try:
        for head in heads:
            _read_weights(head, packer, digest)
        packer.check_magnitudes(plan)
    except AdapterRejected:
        # Bytes that were being overwritten prove nothing about the version that was asked for.
        _check_unchanged(root, name, seen, trusted)
        raise
    if expected_digest is None:
        _check_unchanged(root, name, seen, trusted)
    elif digest.hexdigest() != expected_digest:
        raise AdapterIncomplete(
            Code.CHANGED,
            "the folder holds another version than the one asked for",
            expected=expected_digest[:12],
            found=digest.hexdigest()[:12],
        )
    return packer.adapter


@dataclass(frozen=True, slots=True)
class _Head:
    stamp: FileStamp
    raw: bytes
    tensors: tuple[TensorInfo, ...]


def _read_config(seen: FolderSnapshot) -> AdapterConfig:
    return AdapterConfig.from_bytes(read_small(seen.config, MAX_CONFIG_BYTES))


def _read_heads(seen: FolderSnapshot) -> tuple[_Head, ...]:
    heads = []
    for stamp in seen.weights:
        with open_stamped(stamp) as file:
            raw = read_head(file, stamp)
        heads.append(_Head(stamp, raw, parse_head(raw, stamp.size, stamp.name)))
    return tuple(heads)


def _tensors(seen: FolderSnapshot, heads: tuple[_Head, ...]) -> dict[str, TensorInfo]:
    """All tensors by name; an index must say the same as the headers."""
    tensors: dict[str, TensorInfo] = {}
    for tensor in (tensor for head in heads for tensor in head.tensors):
        if tensors.setdefault(tensor.name, tensor) is not tensor:
            raise AdapterRejected(Code.WEIGHTS_INVALID, f"{show(tensor.name)} is stored in two files")
    if seen.weight_map is not None:
        check_index(seen.weight_map, tensors)
    return tensors


def _read_weights(head: _Head, packer: Packer, digest: ContentDigest) -> None:
    """Stream one file: the bytes that are hashed are the ones that are packed."""
    stamp = head.stamp
    digest.begin(stamp.size)
    digest.update(head.raw)
    with open_stamped(stamp) as file:
        file.seek(len(head.raw))
        for tensor in head.tensors:
            size = tensor.stop - tensor.start
            if packer.wants(tensor):
                raw = torch.empty(size, dtype=torch.uint8)
                view = raw.numpy().data
                read_into(file, view, stamp)
                digest.update(view)
                packer.add(tensor, raw)
            else:
                for chunk in _chunks(file, size, stamp):
                    digest.update(chunk)


def _chunks(file: FileIO, size: int, stamp: FileStamp) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(CHUNK, size)))
    while size:
        chunk = buffer[: min(CHUNK, size)]
        read_into(file, chunk, stamp)
        yield chunk
        size -= len(chunk)


def _check_unchanged(root: Path, name: str, seen: FolderSnapshot, trusted: bool) -> None:
    if fingerprint(root, name, trusted=trusted) != seen.fingerprint:
        raise AdapterIncomplete(Code.CHANGED, "the folder changed while it was read")
