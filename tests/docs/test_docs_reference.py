"""What the code has, the documents name: settings, codes, routes, commands, metrics, seams, modules."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import DOCS, README, ROOT, rows, seam_rows, section

from lora_plugin.admin.models import PoolView
from lora_plugin.admin.routes import ROUTES
from lora_plugin.cli import commands as cli
from lora_plugin.directory.entry import AdapterState
from lora_plugin.errors import Code
from lora_plugin.metrics import Metrics, Snapshot
from lora_plugin.pool.journal import Cause
from lora_plugin.settings import Settings

PACKAGE = ROOT / "lora_plugin"


def read(name: str) -> str:
    return (DOCS / name).read_text()


def sources(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_the_settings_table_is_that_of_the_class() -> None:
    described = [
        [f"`{doc.variable}`", f"`{doc.default}`" if doc.default else "", doc.description]
        for doc in Settings.describe()
    ]
    assert rows(read("settings.md"))[: len(described)] == described


def test_settings_without_effect_are_said_to_be_so() -> None:
    """A setting counts as used where any module but its own reads an attribute of its name."""
    own = {PACKAGE / "settings.py", PACKAGE / "switch.py"}
    used = {
        node.attr
        for path, tree in sources(PACKAGE)
        if path not in own
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).endswith(("settings", "required_settings()"))
    }
    # `enabled` is the switch's, before there are settings.
    unread = {names[0] for field, names in Settings.variables().items() if field not in {*used, "enabled"}}
    assert unread == set(re.findall(r"<!-- unread: (\w+) -->", read("settings.md")))


def test_the_readmes_settings_are_true() -> None:
    known = {doc.variable: doc.default for doc in Settings.describe()}
    table = rows(section(README, "Settings"))
    assert table
    for variable, default, _ in table:
        assert known[variable.strip("`")] == default.strip("`"), variable


def test_every_variable_that_is_named_exists() -> None:
    known = {name for names in Settings.variables().values() for name in names}
    for path in (README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.glob("*.md")):
        named = set(re.findall(r"\bLORA_PLUGIN_[A-Z_]*[A-Z]\b", path.read_text()))
        assert named <= known, path.name


def test_every_code_is_explained_once_in_its_group() -> None:
    table = rows(read("errors.md"))
    assert [row[0].strip("`") for row in table] == [str(code) for code in Code]
    assert all(len(row) == 4 and row[2] and row[3] for row in table)


def test_every_reason_of_an_eviction_is_explained() -> None:
    (row,) = [row for row in rows(read("admin.md")) if row[0] == "`lora_plugin_evictions_total`"]
    assert re.findall(r"`([a-z-]+)`", row[1]) == ["reason", *Cause]


def test_every_route_and_state_is_in_the_admin_document() -> None:
    documented = [row[0].strip("`") for row in rows(section(DOCS / "admin.md", "Routes"))]
    assert documented == [f"{route.method} {route.path}" for route in ROUTES]
    assert f"({', '.join(AdapterState)})" in read("admin.md")


def test_every_metric_is_in_the_admin_document() -> None:
    metrics = Metrics()
    metrics._snapshots.snapshot = Snapshot([], PoolView(engines=()))
    documented = section(DOCS / "admin.md", "Metrics")
    for family in metrics.registry.collect():
        assert re.search(rf"`{family.name}(_total)?`", documented), family.name


def subcommands() -> list[str]:
    parser = cli._parser()
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return list(action.choices)


def test_every_subcommand_is_in_the_admin_document() -> None:
    text = section(DOCS / "admin.md", "The command line")
    named = {word for line in re.findall(r"    lora-plugin ([a-z|]+)", text) for word in line.split("|")}
    assert named == set(subcommands())


def test_the_seams_are_those_of_the_table() -> None:
    table = read("architecture.md").split("<!-- seams -->")[1].split("<!-- end of seams -->")[0].strip()
    expected = ["| module | name | why |", "| --- | --- | --- |", *seam_rows()]
    assert table.splitlines() == expected


def test_every_module_has_its_part() -> None:
    parts = section(DOCS / "architecture.md", "Parts")
    for path in PACKAGE.iterdir():
        if path.name.startswith("__") or path.name == "py.typed":
            continue
        assert f"`{path.name}{'/' if path.is_dir() else ''}" in parts, path.name
    for path in (PACKAGE / "hosts/vllm").glob("[!_]*.py"):
        assert f"`{path.name}`" in parts, path.name


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_only_hosts_import_the_host(path: Path) -> None:
    names = set(imported(ast.parse(path.read_text())))
    if "hosts" in path.relative_to(PACKAGE).parts:
        return
    assert not [name for name in names if name.split(".")[0] == "vllm"]
    allowed = {"lora_plugin.hosts.vllm.install"} if path == PACKAGE / "plugin.py" else set()
    assert {name for name in names if name.startswith("lora_plugin.hosts")} == allowed


def test_the_kernels_import_nothing_else_of_the_project() -> None:
    for path, tree in sources(ROOT / "kernels"):
        own = [name for name in imported(tree) if name.startswith("lora_plugin")]
        assert all(name.startswith("lora_plugin.kernels") for name in own), path


def test_the_hooks_import_pluggy_and_nothing_else() -> None:
    def at_run_time(tree: ast.Module) -> Iterator[str]:
        typing_only = {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for child in ast.walk(node)
        }
        yield from imported(
            ast.Module(
                [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and id(n) not in typing_only], []
            )
        )

    for path, tree in sources(ROOT / "hooks"):
        names = {name for name in at_run_time(tree) if name.split(".")[0] not in sys.stdlib_module_names}
        assert all(name == "pluggy" or name.startswith("lora_plugin.hooks") for name in names), path
