"""Why an adapter does not do what somebody expects: facts of catalog, pools and workers, put into words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lora_plugin.admin.explanation import (
    EngineFactsView,
    FindingView,
    LayersView,
    Level,
    Question,
    ShareView,
)
from lora_plugin.admin.models import AdapterView, TargetView
from lora_plugin.directory.entry import AdapterState
from lora_plugin.layout import ModelLayout

_SHOWN: Final = 50
_OFTEN: Final = 3
"""Evictions from which on an adapter is said to be evicted often."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one adapter or composition.

    Attributes:
        adapter: the catalog's; None for a composition.
        layers: what it changes, where it is loaded.
        engines: each engine's.
        same_content: other adapters with the same version.
    """

    adapter: AdapterView | None
    layers: LayersView | None
    engines: Sequence[EngineFactsView]
    same_content: Sequence[str] = ()


def layers_view(layout: ModelLayout, reported: Sequence[Sequence[Any]] | None) -> LayersView | None:
    """From a worker's (layer, rank, whether it adds anything) for each layer of a packed adapter."""
    if reported is None:
        return None
    names = [layer.name for layer in layout.layers]
    changed = {index for index, rank, adds in reported if rank or adds}
    zero = [names[index] for index, rank, adds in reported if rank and not adds]
    return LayersView(
        wrapped=len(names),
        changed=len(changed),
        unchanged=tuple(name for index, name in enumerate(names) if index not in changed)[:_SHOWN],
        without_effect=len(zero),
        zero=tuple(zero[:_SHOWN]),
    )


def engine_facts(snapshot: Mapping[str, Any], adapter_id: str, report: Mapping[str, Any]) -> EngineFactsView:
    """One engine's pool and first worker about one id."""
    names = {copy["id"]: copy["name"] for copy in snapshot["adapters"]} | {"0": "base"}
    copy = next((copy for copy in snapshot["adapters"] if copy["id"] == adapter_id), None)
    first_row, rows = report["extent"] or (None, None)
    counters = ("loads", "evictions", "hits", "load_seconds")
    counted = {} if copy is None else {counter: copy[counter] for counter in counters}
    return EngineFactsView(
        host="absent" if copy is None else copy["host"],
        first_row=first_row,
        rows=rows,
        waiting_requests=snapshot["waiting"]["requests"],
        longest_wait_seconds=snapshot["waiting"]["longest_seconds"],
        steps=tuple(
            tuple(
                ShareView(
                    adapter=names.get(share["id"], "(gone)"), requests=share["requests"], rows=share["rows"]
                )
                for share in step
            )
            for step in report["steps"]
        ),
        **counted,
    )


def alias_finding(alias: str, targets: Sequence[TargetView]) -> FindingView:
    """An alias has no effect of its own."""
    names = ", ".join(sorted({target.adapter or "the base model" for target in targets}))
    text = f"{alias} is an alias of {names}: ask about that"
    return FindingView(question=Question.NO_EFFECT, level=Level.NOTE, text=text)


def folder_finding(alias: str, targets: Sequence[TargetView]) -> FindingView:
    """An alias goes before the folder of its name, which the other findings are about."""
    names = ", ".join(sorted({target.adapter or "the base model" for target in targets}))
    text = f"requests for {alias} go by an alias to {names}; what follows is about the folder {alias}"
    return FindingView(question=Question.NO_EFFECT, level=Level.NOTE, text=text)


def findings(name: str, facts: Facts) -> tuple[FindingView, ...]:
    """The answers to every question, in order; each question has at least one."""
    answers = {
        Question.NO_EFFECT: _no_effect(facts),
        Question.SLOW: _slow(facts),
        Question.ALIKE: _alike(name, facts),
    }
    return tuple(
        FindingView(question=question, level=level, text=text)
        for question, found in answers.items()
        for level, text in found
    )


_Found = Iterator[tuple[Level, str]]


def _no_effect(facts: Facts) -> _Found:
    adapter, layers = facts.adapter, facts.layers
    if adapter is not None and adapter.state is not AdapterState.LISTED:
        why = f": {adapter.reason}" if adapter.reason else ""
        yield Level.PROBLEM, f"it is {adapter.state}, not served{why}"
        return
    if adapter is not None:
        for warning in adapter.warnings:
            yield Level.NOTE, warning
    if layers is None:
        yield Level.NOTE, "it is not loaded: not asked for yet, or evicted; the next request loads it"
    elif layers.without_effect == layers.changed:
        yield Level.PROBLEM, "B is zero in every layer, so it adds nothing: it was saved untrained"
    else:
        if layers.without_effect:
            yield Level.NOTE, f"B is zero in {layers.without_effect} of its {layers.changed} layers"
        yield (
            Level.OK,
            f"it changes {layers.changed} of {layers.wrapped} layers; all its tensors were matched",
        )


def _slow(facts: Facts) -> _Found:
    if _is_not_served(facts):
        yield Level.NOTE, "it is not served"
        return
    evictions = sum(engine.evictions for engine in facts.engines)
    loads = sum(engine.loads for engine in facts.engines)
    if evictions >= _OFTEN:
        yield (
            Level.PROBLEM,
            f"it lost its rows on the device {evictions} times: more adapters are in use than fit; "
            "raise --max-loras, or pin it",
        )
    for engine in facts.engines:
        if engine.waiting_requests:
            yield (
                Level.NOTE,
                f"{engine.waiting_requests} requests wait for room on the device, the oldest for "
                f"{engine.longest_wait_seconds:.1f} s",
            )
        if engine.host != "ready":
            yield (
                Level.NOTE,
                f"an engine has it {engine.host} in host memory: its next request waits for a load",
            )
    seconds = max((engine.load_seconds for engine in facts.engines), default=0.0)
    rank = None if facts.adapter is None else facts.adapter.rank
    yield (
        Level.OK,
        f"rank {'unknown' if rank is None else rank}; {loads} loads to the device; "
        f"its last read and packing took {seconds:.2f} s",
    )


def _is_not_served(facts: Facts) -> bool:
    return facts.adapter is not None and facts.adapter.state is not AdapterState.LISTED


def _alike(name: str, facts: Facts) -> _Found:
    if _is_not_served(facts):
        yield Level.NOTE, "it is not served"
        return
    if facts.same_content:
        yield Level.PROBLEM, f"it has the same content as {', '.join(facts.same_content)}"
    steps = [step for engine in facts.engines for step in engine.steps]
    mine = [step for step in steps if any(share.adapter == name for share in step)]
    beside = sorted({share.adapter for step in mine for share in step} - {name})
    if not mine:
        yield Level.NOTE, f"it had no row in the last {len(steps)} steps"
        return
    rows = sum(share.rows for step in mine for share in step if share.adapter == name)
    others = f" beside {', '.join(beside)}" if beside else ", nobody else's beside them"
    yield Level.OK, f"{rows} rows of the last {len(steps)} steps were its own{others}"
