"""docs/security.md: every promise names the tests that hold it, and they exist."""

from __future__ import annotations

import re

from documents import DOCS, ROOT, rows

PAGE = DOCS / "security.md"


def test_every_promise_is_held_by_tests_that_exist() -> None:
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    promises = rows(PAGE.read_text().split("## What is promised")[1].split("\n## ")[0])
    assert len(promises) > 10
    for promise, held_by in promises:
        named = set(re.findall(r"`(test_\w+)`", held_by))
        assert named, promise
        assert named <= tests, promise
