"""What hooks are given and what they answer: plain, immutable data, the same in every version of a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

Compute = Callable[["Tensor", "Tensor"], None]
"""Applies the adapters to the output of a layer, for the rows of the present step: adds their share to
y [rows, out] in place, from x [rows, in]. With DoRA it also scales y, which must be the base layer's output.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """What of a client's request can decide about its adapter.

    Attributes:
        model: the body's `model`; empty where it has none.
        fields: the body's top-level fields, as parsed; never to be changed.
        headers: the HTTP headers by lower-case name, what is repeated joined by ", "; `authorization` is
            among them: never to be logged.
        path: the path of the endpoint, "/v1/completions"; empty where it is not known.
        base_models: the names that the base model is served under.
    """

    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    base_models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """An adapter of a composition.

    Attributes:
        adapter: its name, to be looked up in the catalog.
        version: as in `Selection`.
        weight: the factor of what it adds.
    """

    adapter: str
    version: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Selection:
    """The adapter that a request names.

    Attributes:
        adapter: its name, to be looked up among aliases, compositions and the catalog; None for the base
            model.
        version: a prefix of the version that is wanted, at least 7 hexadecimal digits; None for the one
            served.
        parts: adapters to be served together as one, whose name is made of theirs; empty for one that has
            its own folder.
    """

    adapter: str | None
    version: str | None = None
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that may not have the adapter it names.

    Attributes:
        message: one sentence for the client.
        status: the HTTP status: 401, 403, 404 (as for a name that nobody knows), 429 or 503.

    Raises:
        ValueError: for another status.
    """

    message: str
    status: int = 403

    def __post_init__(self) -> None:
        if self.status not in (401, 403, 404, 429, 503):
            raise ValueError(f"a refusal has the status 401, 403, 404, 429 or 503, not {self.status}")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A version of an adapter.

    Attributes:
        name: the name that requests use.
        version: the digest of its content, hexadecimal; None where it is not known yet.
        rank: its highest rank; None where it is not known yet.
        reason: why it is not served, in words; None where it is.
    """

    name: str
    version: str | None = None
    rank: int | None = None
    reason: str | None = None


@runtime_checkable
class Source(Protocol):
    """A place that an adapter folder can be fetched from."""

    @property
    def description(self) -> str:
        """What it is, for the log and the operator; without secrets."""

    def fetch(self, destination: Path) -> None:
        """Write the folder's files into `destination`, an empty folder.

        Called on a thread of the API server; may take its time. An exception means that nothing was fetched;
        its words are logged and the client gets a 503.
        """


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that could join the step.

    Attributes:
        id: the engine's id of it.
        adapter: its adapter's name; None for the base model.
        tokens: prompt tokens that are not computed yet.
        waited: seconds since it arrived in the engine.
    """

    id: str
    adapter: str | None
    tokens: int
    waited: float


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one step.

    Attributes:
        adapters: names of the adapters that have rows in it, in the order of their first row.
        index: per request the index into `adapters`, -1 for the base model.
        tokens: per request its rows.
    """

    adapters: tuple[str, ...]
    index: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A wrapped layer of the model, on one rank.

    Attributes:
        name: its path, "model.layers.0.self_attn.qkv_proj".
        kind: "linear", "embedding" or "lm_head". For an embedding, x holds the token ids [rows].
        in_features: columns of x on this rank.
        out_features: per slice, columns of y on this rank.
        compute: what the plugin does for it.
    """

    name: str
    kind: str
    in_features: int
    out_features: tuple[int, ...]
    compute: Compute
