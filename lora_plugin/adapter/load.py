"""The ways in: compute a folder's digest, or read and pack all of it.

Folders are addressed by directory and name, never by a path from a request. With `trusted`, `root / name` is
a path that the operator gave: any name, and links may lead anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch

from lora_plugin.adapter.base_model import BaseModel
from lora_plugin.adapter.digest import ContentDigest
from lora_plugin.adapter.files import CHUNK, FileStamp, open_stamped, read_into
from lora_plugin.adapter.folder import FolderSnapshot, fingerprint, snapshot
from lora_plugin.adapter.inspection import Head, all_tensors, read_config, read_heads
from lora_plugin.adapter.matching import match
from lora_plugin.adapter.pack import PackedAdapter, Packer, Zeros
from lora_plugin.adapter.pack_outputs import finish_outputs
from lora_plugin.adapter.pack_saved import Comparison
from lora_plugin.adapter.pack_tokens import finish_tokens
from lora_plugin.adapter.plan import scaled
from lora_plugin.errors import AdapterIncomplete, AdapterRejected, Code
from lora_plugin.layout import ModelLayout


def verify(root: Path, name: str, seen: FolderSnapshot, *, trusted: bool = False) -> str:
    """The digest of the content that was looked at, 64 hexadecimal digits.

    Raises:
        AdapterIncomplete: CHANGED, if anything changed since `seen` or while it was read.
        AdapterRejected: the config cannot be read.
    """
    digest = ContentDigest(read_config(seen).canonical)
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
    *,
    base: BaseModel | None = None,
    trusted: bool = False,
    factor: float = 1.0,
    zeros: Zeros | None = None,
) -> PackedAdapter:
    """Read the whole adapter and pack this rank's part of it.

    Args:
        root: the watched directory.
        name: the folder's name.
        layout: the model, with this rank's shards.
        expected_digest: what `verify` said of the version that is wanted; None for whatever is there.
        max_bytes: a larger adapter is refused unread.
        base: the base model's weights, which DoRA, biases, tokens and saved modules are relative to; None
            only checks such an adapter, and leaves what would be made of them zero.
        trusted: see the module.
        factor: of what it adds, as a part of a composition.
        zeros: where it is packed, instead of memory of its own.

    Raises:
        AdapterNotFound: there is no such folder.
        AdapterIncomplete: the folder is not whole, or CHANGED: it holds another version than the one wanted.
        AdapterRejected: it cannot be served.
    """
    seen = snapshot(root, name, max_bytes, trusted=trusted)
    config = read_config(seen)
    heads = read_heads(seen)
    plan = scaled(match(all_tensors(seen, heads), layout, config), factor)
    packer = Packer(plan, layout, zeros)
    comparison = Comparison(plan, layout, base, config.saved_modules)
    digest = ContentDigest(config.canonical)
    try:
        for head in heads:
            _read_weights(head, packer, comparison, digest)
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
    if base is not None:
        finish_tokens(packer.adapter, plan, packer.vectors, layout, base)
        finish_outputs(packer.adapter, plan, packer.vectors, layout, base)
    return comparison.joined(packer.adapter)


def _read_weights(head: Head, packer: Packer, comparison: Comparison, digest: ContentDigest) -> None:
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
                wanted = comparison.wants(tensor)
                for chunk in _chunks(file, size, stamp, comparison.block(tensor) if wanted else CHUNK):
                    digest.update(chunk)
                    if wanted:
                        comparison.add(tensor, chunk)


def _chunks(file: FileIO, size: int, stamp: FileStamp, length: int = CHUNK) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(length, size)))
    while size:
        chunk = buffer[: min(length, size)]
        read_into(file, chunk, stamp)
        yield chunk
        size -= len(chunk)


def _check_unchanged(root: Path, name: str, seen: FolderSnapshot, trusted: bool) -> None:
    if fingerprint(root, name, trusted=trusted) != seen.fingerprint:
        raise AdapterIncomplete(Code.CHANGED, "the folder changed while it was read")
