"""An adapter as the rest of the server sees it: its state, its version, what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lora_plugin.errors import Reason


class AdapterState(StrEnum):
    """Where an adapter is in its life; residency (disk, host, device) is another matter."""

    DISCOVERED = "discovered"
    """its folder was seen and not looked into yet"""
    SETTLING = "settling"
    """its folder is not whole yet: a copy in progress, or a broken one"""
    LISTED = "listed"
    """served"""
    REJECTED = "rejected"
    """refused until its files change"""
    UNLOADED = "unloaded"
    """taken away by the operator until its files change"""


@dataclass(frozen=True, slots=True)
class Version:
    """One content of one adapter; equal in every process and after a restart.

    Attributes:
        name: the adapter.
        digest: 64 hex digits over the canonical config and the weight bytes.
        id: the `lora_int_id`, a function of name and digest.
        rank: the highest rank of its layers.
        nbytes: bytes of its files.
        packed_bytes: bytes once packed, on one rank of the layout.
    """

    name: str
    digest: str
    id: int
    rank: int
    nbytes: int
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder of the watched directory; immutable, replaced as a whole when something changes.

    Attributes:
        name: the folder's name.
        state: where it is in its life.
        reason: why it is not served; with state `listed`, why newer content in its folder is not served yet.
        version: the version that is served; None until its digest was computed (at first use).
        fingerprint: stands for its files' content by their stat data; changes when they do.
        rank, targets, nbytes, packed_bytes, base_model, warnings, source: from its check; see `Content`.
        discovered_at, listed_at: unix seconds.
        at_start: whether the first scan found it already.
        pinned: whether the operator asked to keep it loaded.
    """

    name: str
    state: AdapterState
    discovered_at: float
    reason: Reason | None = None
    version: Version | None = None
    fingerprint: str | None = None
    rank: int | None = None
    targets: tuple[str, ...] = ()
    nbytes: int | None = None
    packed_bytes: int | None = None
    base_model: str | None = None
    warnings: tuple[str, ...] = ()
    source: str | None = None
    listed_at: float | None = None
    at_start: bool = False
    pinned: bool = False
