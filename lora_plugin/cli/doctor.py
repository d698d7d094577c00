"""`lora-plugin doctor`: what may be wrong, with one adapter or with the server."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lora_plugin.cli import human
from lora_plugin.cli.client import Unreachable
from lora_plugin.cli.output import Said, say, show
from lora_plugin.cli.remote import Fill, asks, client_of
from lora_plugin.cli.surroundings import finding, surroundings

Finding = Mapping[str, str]


def _doctor(args: Namespace) -> None:
    if args.name is None:
        found = _of_the_server(args)
        data: Any = found
    else:
        data = client_of(args).explain(args.name)
        found = [{"about": each["question"], **each} for each in data["findings"]]
    show(args, data, lambda _: render(found), _problems(found))
    if _problems(found):
        raise Said


def _of_the_server(args: Namespace) -> list[Finding]:
    """What its endpoint tells; where none answers, what this machine tells is shown first."""
    try:
        client = client_of(args)
        return list(general(client.adapters(), client.routing(), client.pool()))
    except Unreachable as error:
        if args.admin is None:  # else it may be another machine's
            say(args, "no server answers here; what one would start with:")
            here = surroundings(os.environ)
            show(args, here, render, _problems(here))
            if _problems(here):
                say(args, str(error))
                raise Said from None
        raise


def _problems(found: Iterable[Finding]) -> list[str]:
    return [each["about"] for each in found if each["level"] == "problem"]


def render(found: Sequence[Finding]) -> str:
    """One line per finding, the worst first."""
    order = ("problem", "note", "ok")
    lines = sorted(found, key=lambda each: order.index(each["level"]))
    rows = [(each["level"].upper(), each["about"], each["text"]) for each in lines]
    return human.table((), rows or [("OK", "server", "nothing is wrong that can be seen from here")])


def general(
    adapters: Sequence[Mapping[str, Any]], routing: Mapping[str, Any], pool: Mapping[str, Any]
) -> Iterator[Finding]:
    """What is wrong with the server: refused adapters, names that lead nowhere, too little room."""
    for view in adapters:
        if view["state"] in ("rejected", "settling"):
            why = human.reason(view["reason"]) if view["reason"] else "no reason is known"
            level = "problem" if view["state"] == "rejected" else "note"
            yield finding(level, view["name"], f"{view['state']}: {why}")
        for warning in view["warnings"]:
            yield finding("note", view["name"], warning)
    for file in routing["files"]:
        if file["reason"] is not None:
            yield finding("problem", file["name"], human.reason(file["reason"]))
    served = {view["name"] for view in adapters if view["state"] == "listed"}
    compositions = routing["compositions"]
    yield from _dead_ends(compositions, "parts", served)
    yield from _dead_ends(routing["aliases"], "targets", served | {each["name"] for each in compositions})
    for index, engine in enumerate(pool["engines"]):
        yield from _engine(f"engine {index}", engine)


def _dead_ends(named: Iterable[Mapping[str, Any]], key: str, served: set[str]) -> Iterator[Finding]:
    for each in named:
        missing = {target["adapter"] for target in each[key] if target["adapter"] is not None} - served
        for name in sorted(missing):
            yield finding("problem", each["name"], f"stands for {name}, which is not served")


def _engine(about: str, engine: Mapping[str, Any]) -> Iterator[Finding]:
    if engine["waiting_requests"]:
        waited = engine["longest_wait_seconds"]
        text = f"{engine['waiting_requests']} requests wait for room on the device, the oldest {waited:.1f} s"
        yield finding("note", about, text)
    loads, hits = engine["counters"]["loads"], engine["counters"]["hits"]
    moved = engine["counters"]["evictions"].get("device-room", 0)
    if loads > hits and moved > engine["slabs"]:
        text = f"{loads} loads for {hits} hits, {moved} adapters lost their place: more are in use than fit; "
        text += "raise --max-loras"
        yield finding("note", about, text)


def _maybe_named(parser: ArgumentParser) -> None:
    text = "an adapter, alias or composition; without it, the server as a whole"
    parser.add_argument("name", metavar="NAME", nargs="?", help=text)


COMMANDS: tuple[tuple[str, str, Fill], ...] = (
    ("doctor", "say what may be wrong with an adapter, or with the server", asks(_doctor, _maybe_named)),
)
