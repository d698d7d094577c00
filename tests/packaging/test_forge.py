"""Workflows and issue forms are what the forge takes, and run what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
FORMS = ROOT / ".github/ISSUE_TEMPLATE"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SCHEMAS = {
    **dict.fromkeys(WORKFLOWS, "github-workflows"),
    **dict.fromkeys(FORMS.glob("[!c]*.yml"), "github-issue-forms"),
    FORMS / "config.yml": "github-issue-config",
}


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("file", SCHEMAS, ids=lambda file: file.name)
def test_it_fits_the_forges_schema(file: Path) -> None:
    schema = ("--builtin-schema", f"vendor.{SCHEMAS[file]}")
    command = [sys.executable, "-m", "check_jsonschema", *schema, str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_workflows_run_what_there_is() -> None:
    commands = [step["run"] for workflow in WORKFLOWS for step in steps(workflow) if "run" in step]
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
    assert ".ci/run" in commands
    assert {target for command in commands for target in re.findall(r"^make (\S+)$", command)} <= targets


def test_only_the_job_that_publishes_may_more_than_read() -> None:
    for workflow in WORKFLOWS:
        document = yaml.safe_load(workflow.read_text())
        assert document["permissions"] == {"contents": "read"}
        granted = {name: job["permissions"] for name, job in document["jobs"].items() if "permissions" in job}
        assert granted in ({}, {"publish": {"id-token": "write"}})


def test_commit_hooks_run_the_tools_that_make_lint_runs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    lint = MAKEFILE.partition("\nlint:")[2].partition("\n\n")[0]
    entries = " ".join(hook["entry"] for hook in local["hooks"])
    for tool in ("ruff check", "ruff format", "tools/typecheck.sh"):
        assert tool in entries
        assert tool in lint
