"""Every way of naming an adapter, alone and against each other."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lora_plugin.errors import AdapterNotFound, BadRequest, Code
from lora_plugin.hooks import Part, Request, Selection, hookimpl
from lora_plugin.hooks.builtin import BUILTIN
from lora_plugin.hooks.builtin.naming import WAYS
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hooks.plugins import Plugin
from lora_plugin.routing.files import RoutingFiles
from lora_plugin.routing.router import Route, Router

BASES = ("smollm2", "org/smollm2:large")
OLD = "4f2a91c"


def request(model: str = "smollm2", header: str | None = None, **fields: Any) -> Request:
    headers = {} if header is None else {"x-lora-adapter": header}
    return Request(model, fields, headers, "/v1/completions", BASES)


@pytest.fixture
def files(tmp_path: Path) -> RoutingFiles:
    (tmp_path / "aliases.yaml").write_text("prod: sql\nold: sql@4f2a91c\noff: base\npair: mix\n")
    (tmp_path / "compositions.yaml").write_text("mix: a*0.7+b\n")
    files = RoutingFiles(tmp_path, BASES, settle_seconds=0.2)
    files.look(at_once=True)
    assert files.aliases.reason is files.compositions.reason is None
    return files


def router(files: RoutingFiles, blocked: tuple[str, ...] = (), *plugins: Plugin) -> Router:
    builtin = [Plugin(name, holder, builtin=True) for name, holder in BUILTIN.items() if name not in blocked]
    return Router(HookManager([*plugins, *builtin]), files, BASES)


MIX = (Part("a", None, 0.7), Part("b"))
WAYS_TO_SAY: dict[str, tuple[Request, Route]] = {
    "model-name": (request("sql"), Route("sql", "sql")),
    "model-prefix": (request("org/smollm2:large:sql"), Route("sql", "sql")),
    "model-version": (request(f"sql@{OLD}"), Route(f"sql@{OLD}", "sql", OLD)),
    "model-composition": (request("b+a*0.7"), Route("a*0.7+b", "a*0.7+b", None, MIX)),
    "field-lora-path": (request(lora_path="sql"), Route("sql", "sql")),
    "field-adapter-id": (request(adapter_id=f"sql@{OLD}ff"), Route(f"sql@{OLD}ff", "sql", f"{OLD}ff")),
    "header": (request(header="sql"), Route("sql", "sql")),
}


def test_every_way_is_here() -> None:
    assert WAYS_TO_SAY.keys() == WAYS.keys()


@pytest.mark.parametrize("way", WAYS)
def test_a_way_of_naming_and_its_block(files: RoutingFiles, way: str) -> None:
    said, route = WAYS_TO_SAY[way]
    assert router(files).route(said) == route
    blocked = router(files, (way,))
    if said.model == "smollm2":
        assert blocked.route(said) == Route("smollm2", None)
    else:
        with pytest.raises(AdapterNotFound):
            blocked.route(said)


@pytest.mark.parametrize("model", ["", *BASES])
def test_the_base_model(files: RoutingFiles, model: str) -> None:
    assert router(files).route(request(model)).adapter is None
    assert router(files).route(request(model, lora_path="base", adapter_id=None)) == Route("base", None)


def test_base_is_a_name_like_any_other_in_model(files: RoutingFiles) -> None:
    assert router(files).route(request("base")) == Route("base", "base")


SAYINGS = {
    "model": lambda name: request(name),
    "prefix": lambda name: request(f"smollm2:{name}"),
    "lora_path": lambda name: request(lora_path=name),
    "adapter_id": lambda name: request(adapter_id=name),
    "header": lambda name: request(header=name),
}


@pytest.mark.parametrize(("one", "other"), itertools.combinations(SAYINGS, 2))
def test_two_ways_agree_or_are_refused(files: RoutingFiles, one: str, other: str) -> None:
    if {one, other} == {"model", "prefix"}:
        return

    def both(first: str, second: str) -> Request:
        a, b = SAYINGS[one](first), SAYINGS[other](second)
        return Request(
            b.model if a.model == "smollm2" else a.model,
            {**a.fields, **b.fields},
            {**a.headers, **b.headers},
            a.path,
            BASES,
        )

    assert router(files).route(both("sql", "sql")).adapter == "sql"
    for first, second in (("sql", "law"), ("sql", "base")):
        if second == "base" and other == "prefix":
            continue
        with pytest.raises(BadRequest) as error:
            router(files).route(both(first, second))
        assert error.value.code is Code.NAME_CONFLICT
        assert repr(first) in str(error.value)
        assert repr(second) in str(error.value)


def test_the_more_exact_version_counts(files: RoutingFiles) -> None:
    said = request("sql", lora_path=f"sql@{OLD}", header=f"sql@{OLD}ab")
    assert router(files).route(said).version == f"{OLD}ab"
    with pytest.raises(BadRequest):
        router(files).route(request(f"sql@{OLD}", header="sql@0000000"))


@pytest.mark.parametrize(
    "value", [7, ["sql"], {"a": 1}, True, "../sql", "/adapters/sql", "sql/", "a+b", "sql@1"]
)
def test_what_is_no_name_is_not_ignored(files: RoutingFiles, value: Any) -> None:
    """It becomes a name that no folder can have, so the look-up answers 404 and nothing is opened."""
    route = router(files).route(request(lora_path=value))
    assert route.adapter is not None
    assert route.adapter != "sql"
    assert not route.parts


@pytest.mark.parametrize(
    ("name", "route"),
    [
        ("prod", Route("prod", "sql")),
        ("old", Route("old", "sql", OLD)),
        ("off", Route("off", None)),
        ("pair", Route("pair", "mix", parts=MIX)),
        ("mix", Route("mix", "mix", parts=MIX)),
        (f"prod@{OLD}", Route(f"prod@{OLD}", "prod", OLD)),
    ],
)
def test_aliases_and_compositions(files: RoutingFiles, name: str, route: Route) -> None:
    for said in (request(name), request(header=name) if "+" not in name else request(name)):
        assert router(files).route(said) == route


def test_a_third_party_plugin_decides_alone(files: RoutingFiles) -> None:
    class Tenants:
        @hookimpl
        def select_adapter(self, request: Request) -> Selection | None:
            return Selection(request.headers["x-tenant"]) if "x-tenant" in request.headers else None

    class Composers:
        @hookimpl
        def select_adapter(self, request: Request) -> Selection | None:
            return Selection(None, parts=MIX) if request.model == "blend" else None

    composed = router(files, (), Plugin("composers", Composers())).route(request("blend"))
    assert composed == Route("a*0.7+b", "a*0.7+b", None, MIX)
    theirs = router(files, (), Plugin("tenants", Tenants()))
    said = Request("law", {"lora_path": "sql"}, {"x-tenant": "prod"}, "", BASES)
    assert theirs.route(said) == Route("prod", "sql")
    assert theirs.route(request("sql")) == Route("sql", "sql")
