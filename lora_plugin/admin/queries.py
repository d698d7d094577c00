"""The query strings of the routes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from lora_plugin.admin.models import AdapterView
from lora_plugin.directory.entry import AdapterState


class Query(BaseModel):
    """Base of the query strings: nothing unknown is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ListQuery(Query):
    """The query of `GET /v1/adapters`."""

    state: AdapterState | None = Field(default=None, description="only adapters in this state")
    q: str | None = Field(
        default=None, max_length=100, description="only names that contain this, whatever the case"
    )
    pinned: bool | None = Field(default=None, description="only adapters that are pinned, or that are not")
    resident: Literal["host", "device"] | None = Field(
        default=None, description="only adapters that an engine holds there"
    )
    sort: Literal["name", "requests", "used", "size"] = Field(
        default="name",
        description="by name; or most requests, latest use or largest first",
    )
    limit: int = Field(default=100, ge=1, le=1000, description="adapters on a page")
    offset: int = Field(default=0, ge=0, le=1_000_000_000, description="adapters before the page")

    def select(self, adapters: Iterable[AdapterView]) -> list[AdapterView]:
        """Those that match, in the order asked for; `adapters` are sorted by name."""
        return sorted(filter(self._matches, adapters), key=self._place)

    def _matches(self, adapter: AdapterView) -> bool:
        return (
            (self.state is None or adapter.state == self.state)
            and (self.q is None or self.q.lower() in adapter.name.lower())
            and (self.pinned is None or adapter.pinned == self.pinned)
            and (self.resident is None or getattr(adapter.residency, self.resident) > 0)
        )

    def _place(self, adapter: AdapterView) -> float:
        match self.sort:
            case "requests":
                return -adapter.requests
            case "used":
                age = adapter.last_used_seconds_ago
                return float("inf") if age is None else age
            case "size":
                return -adapter.nbytes
        return 0


class LoadQuery(Query):
    """The query of `PUT /v1/adapters/{name}`."""

    wait: float = Field(
        default=0.0, ge=0, le=300, allow_inf_nan=False, description="seconds to wait for the load at most"
    )


class UnloadQuery(Query):
    """The query of `DELETE /v1/adapters/{name}`."""

    drain: Literal["abort"] | Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] | None = Field(
        default=None,
        description="seconds after which requests that still run are ended, or abort: at once; "
        "without it they finish",
    )

    @property
    def seconds(self) -> float | None:
        """The time that requests have; None: as long as they take."""
        return 0.0 if self.drain == "abort" else self.drain


class EventsQuery(Query):
    """The query of `GET /v1/events`."""

    after: str | None = Field(
        default=None,
        max_length=100,
        description='an event\'s id: what came after it is sent first; "0" for all that is still held. '
        "Instead of Last-Event-ID",
    )
