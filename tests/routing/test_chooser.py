"""From a request to a version: who may have it, what an older one needs, when the base model steps in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from catalog_samples import Bench, write_adapter

from lora_plugin.directory.entry import Version
from lora_plugin.errors import AdapterNotFound, Refused
from lora_plugin.hooks import Part, Refusal, Request, hookimpl
from lora_plugin.hooks.builtin import BUILTIN
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hooks.plugins import Plugin
from lora_plugin.readiness.staging import StageSpec
from lora_plugin.routing.chooser import Chooser
from lora_plugin.routing.files import RoutingFiles
from lora_plugin.routing.router import Router
from lora_plugin.routing.scope import Chosen, RequestScope

OLD = "ab" * 32
ALIASES = """\
brave: {to: nobody, fallback: base}
strict: nobody
shut: {to: secret, fallback: base}
dated: {to: a@0123456, fallback: base}
"""


class Door:
    """Lets nobody have `secret`."""

    @hookimpl
    def authorize(self, adapter: str) -> Refusal | None:
        return Refusal("not for you") if adapter == "secret" else None


class Engines:
    """Hold one older version of `a`, or have lost it when it is to be kept."""

    def __init__(self, *, lost: bool = False) -> None:
        self.lost = lost
        self.kept: list[int] = []

    async def versions(self, name: str) -> list[list[dict[str, Any]]]:
        assert name == "a"
        copy = {"id": "77", "digest": OLD, "host": "ready", "nbytes": 64}
        other = {**copy, "id": "78", "digest": "cd" * 32}
        return [[copy, other], [copy]]

    def take(self, version_id: int) -> Callable[[], None]:
        return self._until_the_end(version_id)

    async def keep(self, version_id: int) -> Callable[[], None] | None:
        return None if self.lost else self._until_the_end(version_id)

    def _until_the_end(self, version_id: int) -> Callable[[], None]:
        self.kept.append(version_id)
        return lambda: self.kept.remove(version_id)


class Versions:
    """The served ones, ready at once."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    async def version(self, name: str) -> Version:
        return self.bench.catalog.version_of(name)

    async def select(self, name: str, scope: RequestScope, *, several: bool) -> StageSpec:
        version = self.bench.catalog.version_of(name)
        return StageSpec(version.id, name, version.digest, "", 0)

    async def compose(self, name: str, parts: tuple[Part, ...], scope: RequestScope, *, several: bool) -> Any:
        return StageSpec(99, name, "ef" * 32, "", 0)


class House:
    """A chooser and what is around it."""

    def __init__(self, root: Path, *, lost: bool = False, log_level: int = logging.DEBUG) -> None:
        self.bench = Bench(root)
        for seed, name in enumerate(("a", "b", "secret")):
            write_adapter(root / name, seed)
        (root / "aliases.yaml").write_text(ALIASES)
        self.bench.settle()
        files = RoutingFiles(root, ("base-model",), settle_seconds=0.2)
        files.look(at_once=True)
        builtin = [Plugin(name, holder, builtin=True) for name, holder in BUILTIN.items()]
        hooks = HookManager([Plugin("door", Door()), *builtin])
        router = Router(hooks, files, ("base-model",))
        self.engines = Engines(lost=lost)
        leases: Any = self.engines
        self.chooser = Chooser(
            router,
            hooks,
            self.bench.catalog,
            self.engines,
            leases,
            Versions(self.bench),
            log_level=log_level,
        )
        self.scope = RequestScope("/v1/completions")

    def choose(self, model: str, request_id: str = "r1") -> Chosen:
        request = Request(model, {}, {"x-request-id": request_id}, "/v1/completions", ("base-model",))
        return asyncio.run(self.chooser.choose(request, self.scope))

    def check(self, model: str) -> None:
        self.chooser.check(Request(model, {}, {}, "/tokenize", ("base-model",)))


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_served_versions_and_compositions(house: House) -> None:
    digest = house.bench.catalog.version_of("a").digest
    assert house.choose("a").label == f"a@{digest[:12]}"
    assert house.choose(f"a@{digest[:9]}").label == f"a@{digest[:12]}"
    assert house.choose("b*2+a").label == "a+b*2@efefefefefef"
    assert house.choose("base-model") == Chosen(None, "base-model")


def test_an_older_version_is_kept_until_the_response_has_ended(house: House) -> None:
    chosen = house.choose(f"a@{OLD[:8]}")
    assert chosen.spec is not None
    assert (chosen.spec.id, chosen.spec.digest) == (77, OLD)
    assert house.engines.kept == [77, 77]
    house.scope.end()
    assert house.engines.kept == []


def test_an_older_version_that_not_every_engine_has(house: House) -> None:
    with pytest.raises(AdapterNotFound) as error:
        house.choose("a@cdcdcdc")
    assert house.bench.catalog.version_of("a").digest[:12] in str(error.value)


def test_an_older_version_that_was_lost_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound):
        House(tmp_path, lost=True).choose(f"a@{OLD[:8]}")


def test_the_base_model_steps_in_only_where_the_alias_says_so(house: House) -> None:
    assert house.choose("brave") == Chosen(None, "brave")
    with pytest.raises(AdapterNotFound):
        house.choose("strict")


def test_the_base_model_steps_in_while_the_files_are_being_replaced(house: House) -> None:
    write_adapter(house.bench.root / "a", seed=9)
    assert house.choose("dated") == Chosen(None, "dated")


@pytest.mark.parametrize("model", ["secret", "a+secret", "shut"])
def test_a_refusal_is_no_reason_for_the_base_model(house: House, model: str) -> None:
    """Each part of a composition is asked about, and an alias by what it stands for."""
    with pytest.raises(Refused, match="not for you"):
        house.choose(model)
    with pytest.raises(Refused):
        house.check(model)


@pytest.mark.parametrize("path", ["/srv/adapters/a", "adapters/a", "./a"])
def test_a_path_is_told_to_be_no_name(house: House, path: str) -> None:
    with pytest.raises(AdapterNotFound, match="a path is none"):
        house.check(path)
    with pytest.raises(AdapterNotFound) as other:
        house.check("nobody")
    assert other.value.reason.hint is None


def test_check_loads_nothing_and_says_the_same(house: House) -> None:
    for model in ("a", "brave", "base-model", "a+b"):
        house.check(model)
    for model in ("nobody", "strict", "a+nobody"):
        with pytest.raises(AdapterNotFound):
            house.check(model)


def test_one_line_per_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lora_plugin")
    House(tmp_path / "quiet").choose("a")
    assert "asked for" not in caplog.text
    House(tmp_path / "loud", log_level=logging.INFO).choose("brave")
    line = next(record.getMessage() for record in caplog.records if "asked for" in record.getMessage())
    assert line.startswith("request r1 to /v1/completions: asked for 'brave', gets base after ")


def test_a_client_cannot_forge_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lora_plugin")
    House(tmp_path, log_level=logging.INFO).choose("a", "r1\x85\x9b2Jrequest r2")
    line = next(record.getMessage() for record in caplog.records if "asked for" in record.getMessage())
    assert line.startswith(r"request 'r1\x85\x9b2Jrequest r2' to /v1/completions")
    assert line.isprintable()
