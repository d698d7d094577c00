"""Every response of the admin endpoint. Sizes are bytes, times seconds, rows the pool's rank rows."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from lora_plugin.directory.entry import AdapterState
from lora_plugin.directory.events import EventKind
from lora_plugin.errors import Code, Reason


class View(BaseModel):
    """Base of the responses: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReasonView(View):
    """Why an adapter is not served; the same words as in the log and in a client's error."""

    code: Code
    message: str
    expected: str | None = None
    found: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, reason: Reason) -> Self:
        return cls.model_validate(reason.to_dict())

    def __str__(self) -> str:
        return str(Reason(self.code, self.message, self.expected, self.found, self.hint))


class Residency(View):
    """Where an adapter's weights are."""

    disk: bool = Field(description="the folder is in the watched directory")
    host: int = Field(ge=0, description="engines that hold it in host memory")
    device: int = Field(ge=0, description="engines that hold it on the device")
    engines: int = Field(ge=0, description="engines in all")


class AdapterView(View):
    """One adapter: what was found in its folder and where it is now."""

    name: str
    state: AdapterState
    reason: ReasonView | None = Field(default=None, description="why it is not served")
    version: str | None = Field(
        default=None, description="digest of the content, hexadecimal; null until computed"
    )
    id: str | None = Field(
        default=None, description="the integer id inside the engine, as a string (62 bits)"
    )
    rank: int | None = None
    targets: tuple[str, ...] = Field(default=(), description="leaf names of the modules it changes")
    nbytes: int = Field(default=0, ge=0, description="bytes of its weight files")
    packed_bytes: int = Field(default=0, ge=0, description="bytes in host memory once packed")
    base_model: str | None = Field(default=None, description="the base model its config names")
    warnings: tuple[str, ...] = ()
    source: str | None = Field(
        default=None, description="where it was fetched from, with the commit; null for a copied folder"
    )
    pinned: bool = False
    residency: Residency
    requests: int = Field(default=0, ge=0, description="unfinished requests, all engines")
    listed_at: float | None = Field(default=None, description="Unix time, seconds")
    last_used_seconds_ago: float | None = None


class AdapterPage(View):
    """A page of adapters, sorted by name."""

    adapters: tuple[AdapterView, ...]
    total: int = Field(description="adapters that match the filters, on all pages")
    offset: int
    limit: int


class ExtentView(View):
    """Rows of one slab that one adapter version holds, the same rows in every layer."""

    slab: int
    adapter: str
    version: str
    first_row: int
    rows: int
    pinned: bool
    requests: int


class PoolCounters(View):
    """What one engine's pool has done since its start."""

    loads: int = Field(default=0, description="copies from host memory to the device")
    hits: int = Field(default=0, description="requests whose adapter was on the device when they arrived")
    misses: int = Field(default=0, description="requests whose adapter was not")
    evictions: dict[str, int] = Field(default_factory=dict, description="by reason")


class EngineView(View):
    """One engine's pool."""

    slabs: int
    slab_rows: int
    rows_total: int
    rows_free: int
    host_rows: int = Field(default=0, description="rank rows of all copies in host memory, rounded up to 8")
    host_bytes: int
    device_bytes: int = Field(default=0, description="bytes of the copies that lie on the device, too")
    host_budget_bytes: int
    waiting_requests: int = Field(default=0, description="requests that wait for room on the device")
    longest_wait_seconds: float = Field(default=0.0, description="how long the oldest of them has waited")
    extents: tuple[ExtentView, ...] = ()
    counters: PoolCounters = PoolCounters()


class PoolView(View):
    """The pools of all engines, in the engines' order."""

    engines: tuple[EngineView, ...]


class EventView(View):
    """One transition of an adapter; the data of a server-sent event."""

    id: str = Field(description="for Last-Event-ID")
    time: float = Field(description="Unix time, seconds")
    kind: EventKind
    name: str
    version: str | None = None
    reason: ReasonView | None = None


class SettingView(View):
    """One setting as it is in force in this process."""

    variable: str
    value: str = Field(description="as it would be set; **** for a secret")
    source: str = Field(description='the variable it was read from, or "default"')
    description: str


class ConfigView(View):
    """All settings, in the order of the documentation."""

    settings: tuple[SettingView, ...]


class HubSource(View):
    """A repository of the Hugging Face Hub."""

    hub: str = Field(description="org/repo", pattern=r"^[\w.-]+/[\w.-]+$", max_length=200)
    revision: str | None = Field(default=None, description="branch, tag or commit", max_length=200)


class LoadBody(View):
    """Where an adapter comes from that is not in the watched directory; empty for one that is."""

    source: HubSource | None = None


class TargetView(View):
    """What an alias stands for, or a part of a composition."""

    adapter: str | None = Field(description="null: the base model")
    version: str | None = Field(default=None, description="how the version begins; null: the one served")
    weight: float = Field(description="share of the requests, or factor of what it adds")


class AliasView(View):
    """One alias."""

    name: str
    targets: tuple[TargetView, ...]
    sticky: str | None = Field(default=None, description="the header that a choice sticks to")
    fallback: bool = Field(description="whether the base model answers when a target cannot be served")


class CompositionView(View):
    """One named composition."""

    name: str
    parts: tuple[TargetView, ...]


class RoutingFileView(View):
    """A routing file, as this process knows it."""

    name: str
    entries: int = Field(ge=0, description="in its last good content")
    reason: ReasonView | None = Field(default=None, description="what is wrong with its present content")


class RoutingView(View):
    """The names that are no folders."""

    aliases: tuple[AliasView, ...]
    compositions: tuple[CompositionView, ...]
    files: tuple[RoutingFileView, ...]


class HealthView(View):
    """The answer of a ready endpoint."""

    status: Literal["ok"] = "ok"


class RouteView(View):
    """One line of the route list."""

    method: str
    path: str
    summary: str


class IndexView(View):
    """What the endpoint offers."""

    version: str = Field(description="the plugin's version")
    routes: tuple[RouteView, ...]
