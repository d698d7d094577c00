"""What the commands print for people, word for word; `UPDATE_GOLDEN=1` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_runs import run

GOLDEN = Path(__file__).parent / "golden"

RUNS = {
    "list": ("list", "--format", "human"),
    "list-quiet": ("list", "--format", "quiet"),
    "show": ("show", "sql", "--format", "human"),
    "show-rejected": ("show", "wide", "--format", "human"),
    "pool": ("pool", "--format", "human"),
    "routing": ("routing", "--format", "human"),
    "load": ("load", "sql", "--format", "human"),
    "pin": ("pin", "sql", "--format", "human"),
    "evict-in-use": ("evict", "busy", "--format", "human"),
    "unload-without-yes": ("unload", "sql"),
    "unload": ("unload", "sql", "--yes", "--format", "human"),
    "unload-quiet": ("unload", "sql", "--yes", "--format", "quiet"),
    "top": ("top", "--once"),
    "watch": ("watch", "--after", "0", "--count", "3", "--format", "human"),
}


@pytest.mark.parametrize("name", RUNS)
def test_output_is_word_for_word(name: str, url: str) -> None:
    result = run(*RUNS[name], "--admin", url, TZ="UTC", COLUMNS="100", LINES="30")
    output = f"exit code {result.returncode}\n--- stdout\n{result.stdout}--- stderr\n{result.stderr}"
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(output)
    assert output == golden.read_text()


def test_every_golden_file_has_its_run() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(RUNS)
