"""The answer of `GET /v1/adapters/{name}/explain`."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from lora_plugin.admin.models import AdapterView, TargetView, View


class Question(StrEnum):
    """What people ask when an adapter does not do what they expect."""

    NO_EFFECT = "no-effect"
    """does the output equal the base model's?"""
    SLOW = "slow"
    """are its requests slow?"""
    ALIKE = "alike"
    """are the outputs of several adapters alike?"""


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


class FindingView(View):
    """One answer to one question."""

    question: Question
    level: Level
    text: str


class LayersView(View):
    """What of the model the loaded adapter changes, on the first rank."""

    wrapped: int = Field(description="layers that could have an adapter")
    changed: int = Field(description="layers in which it has rank")
    without_effect: int = Field(description="of these, the ones that add nothing: B is zero")
    unchanged: tuple[str, ...] = Field(default=(), description="layers without rank, the first 50")
    zero: tuple[str, ...] = Field(default=(), description="layers without effect, the first 50")


class ShareView(View):
    """The requests of one adapter, or of the base model, in one step."""

    adapter: str = Field(description="its name, or base")
    requests: int
    rows: int


class EngineFactsView(View):
    """What one engine knows of the adapter."""

    host: str = Field(description="absent, waiting, staging or ready")
    first_row: int | None = Field(default=None, description="of its rows on the device")
    rows: int | None = None
    loads: int = 0
    evictions: int = Field(default=0, description="how often it lost its rows on the device")
    hits: int = 0
    load_seconds: float = Field(default=0.0, description="how long its last read and packing took")
    waiting_requests: int = Field(default=0, description="of all adapters, for room on the device")
    longest_wait_seconds: float = 0.0
    steps: tuple[tuple[ShareView, ...], ...] = Field(default=(), description="the last ones, oldest first")


class ExplanationView(View):
    """One name: what it stands for, where it is, and what may be wrong."""

    name: str
    stands_for: tuple[TargetView, ...] = Field(default=(), description="of an alias or a composition")
    adapter: AdapterView | None = None
    layers: LayersView | None = Field(default=None, description="null: it is not loaded")
    engines: tuple[EngineFactsView, ...] = ()
    findings: tuple[FindingView, ...]
