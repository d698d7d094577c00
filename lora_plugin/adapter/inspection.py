"""What the config and the headers of a folder say, without a weight read and without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_plugin.adapter.checkpoint import TensorInfo, parse_head, read_head
from lora_plugin.adapter.config import MAX_CONFIG_BYTES, AdapterConfig
from lora_plugin.adapter.document import show, show_some
from lora_plugin.adapter.files import FileStamp, open_stamped, read_small
from lora_plugin.adapter.folder import FolderSnapshot, snapshot
from lora_plugin.adapter.index import check_index
from lora_plugin.adapter.matching import match
from lora_plugin.adapter.plan import Plan
from lora_plugin.errors import AdapterRejected, Code
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
        """What a person may want to know though it is served."""
        inner = self.snapshot.inner
        if not inner:
            return self.plan.warnings
        # What `cp -r new sql` and `mv new sql` do where `sql` is there already.
        inside = f"the adapter in its folder {show_some(inner)} is not served"
        return (*self.plan.warnings, f"{inside}: to update, write its files over these")


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
    config = read_config(seen)
    heads = read_heads(seen)
    return Inspection(seen, config, match(all_tensors(seen, heads), layout, config))


@dataclass(frozen=True, slots=True)
class Head:
    """The header of one weights file.

    Attributes:
        stamp: the file.
        raw: the length prefix and the JSON.
        tensors: in the order of their bytes.
    """

    stamp: FileStamp
    raw: bytes
    tensors: tuple[TensorInfo, ...]


def read_config(seen: FolderSnapshot) -> AdapterConfig:
    """The checked config; raises what `AdapterConfig.from_bytes` does."""
    return AdapterConfig.from_bytes(read_small(seen.config, MAX_CONFIG_BYTES))


def read_heads(seen: FolderSnapshot) -> tuple[Head, ...]:
    """The headers of all weights files, in the order of their names.

    Raises:
        AdapterRejected: WEIGHTS_INVALID, TOO_LARGE or DTYPE_UNSUPPORTED.
        AdapterIncomplete: INCOMPLETE or CHANGED.
    """
    heads = []
    for stamp in seen.weights:
        with open_stamped(stamp) as file:
            raw = read_head(file, stamp)
        heads.append(Head(stamp, raw, parse_head(raw, stamp.size, stamp.name)))
    return tuple(heads)


def all_tensors(seen: FolderSnapshot, heads: tuple[Head, ...]) -> dict[str, TensorInfo]:
    """All tensors by name; an index must say the same as the headers.

    Raises:
        AdapterRejected: WEIGHTS_INVALID.
    """
    tensors: dict[str, TensorInfo] = {}
    for tensor in (tensor for head in heads for tensor in head.tensors):
        if tensors.setdefault(tensor.name, tensor) is not tensor:
            raise AdapterRejected(Code.WEIGHTS_INVALID, f"{show(tensor.name)} is stored in two files")
    if seen.weight_map is not None:
        check_index(seen.weight_map, tensors)
    return tensors
