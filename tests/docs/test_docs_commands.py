"""What the documents say to type: targets, subcommands, flags, variables, addresses, files, links exist."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from documents import DOCS, README, ROOT, commands

from lora_plugin.admin.routes import ROUTES
from lora_plugin.cli import commands as cli
from lora_plugin.settings import Settings

PAGES = (
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *ROOT.glob("examples/**/README.md"),
    *DOCS.glob("*.md"),
)
HOST_PORT = 8000


def host_source(path: str) -> str:
    """A file of the installed vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / path).read_text()


def words(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables set before a command, and its words."""
    parts = shlex.split(command)
    count = next((i for i, part in enumerate(parts) if not re.match(r"[A-Z_]+=", part)), len(parts))
    return dict(part.split("=", 1) for part in parts[:count]), parts[count:]


def typed() -> list[tuple[dict[str, str], list[str]]]:
    return [words(command) for page in PAGES for command in commands(page.read_text()) if is_shell(command)]


def is_shell(command: str) -> bool:
    return bool(
        re.match(r"([A-Z_]+=\S+ )*(make|pip|mkdir|cp|curl|vllm|lora-plugin|\.venv/bin/\w+)\b", command)
    )


def of(program: str) -> list[tuple[dict[str, str], list[str]]]:
    found = [(given, rest) for given, rest in typed() if Path(rest[0]).name == program]
    assert found, program
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_are_headings(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        target = page.parent / link if link else page
        titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        known = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
        assert anchor in known, f"{link}#{anchor}"


def test_every_document_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    missing = [page.name for page in DOCS.glob("*.md") if f"({page.name})" not in index]
    assert missing == ["README.md"]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {target for _, (_, target, *_) in of("make")} <= targets
    for page in PAGES:
        assert set(re.findall(r"`make ([a-z]+)`", page.read_text())) <= targets


def test_subcommands_parse() -> None:
    for _, (_, *arguments) in of("lora-plugin"):
        if not {"|", "["} & set(" ".join(arguments)):
            cli._parsed(arguments)  # which refuses flags that are none, but those of `serve`


def test_variables_exist() -> None:
    ours = {name for names in Settings.variables().values() for name in names}
    hosts = host_source("envs.py")
    for given, _ in typed():
        for name in given:
            assert (
                name in ours
                or (name.startswith("VLLM_") and f'"{name}"' in hosts)
                or name in ("HF_HUB_OFFLINE", "PYTHONPATH")
            )


def test_the_hosts_flags_exist() -> None:
    known = host_source("engine/arg_utils.py") + host_source("entrypoints/launchers/cli_args.py")
    for _, arguments in of("vllm"):
        assert arguments[1] == "serve"
        for flag in (word for word in arguments if word.startswith("--")):
            assert f'"{flag}"' in known, flag


def test_addresses_and_bodies_are_right() -> None:
    admin_port = Settings.model_fields["admin_port"].default
    routes = [re.sub(r"{\w+}", "[^/]+", route.path) for route in ROUTES]
    for _, arguments in of("curl"):
        url = next(word for word in arguments if "://" in word or word.startswith("localhost"))
        parts = urlsplit(url if "://" in url else f"http://{url}")
        assert parts.port in (HOST_PORT, admin_port)
        if parts.port == admin_port:
            assert any(re.fullmatch(route, parts.path) for route in routes), parts.path
        if "-d" in arguments:
            body = json.loads(arguments[arguments.index("-d") + 1])
            assert body.get("model") or body.get("lora_name")


def test_files_that_are_copied_exist() -> None:
    for _, arguments in of("cp"):
        source = arguments[-2]
        assert source.startswith(("/path/", "/", "my-")) or (ROOT / source).exists(), source


def test_scripts_that_are_run_exist() -> None:
    scripts = {word for _, arguments in typed() for word in arguments if word.endswith(".py")}
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)
