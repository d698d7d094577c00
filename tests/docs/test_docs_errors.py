"""docs/errors.md: each code with an example, as the code that raises it words it now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import DOCS, section
from error_examples import EXAMPLES

from lora_plugin.errors import Code

EXAMPLE_LINES = [
    line.strip() for line in section(DOCS / "errors.md", "Examples").splitlines() if line.startswith("    ")
]


def test_every_code_has_an_example() -> None:
    assert list(EXAMPLES) == list(Code)
    assert [re.findall(r"\[([a-z-]+)\]", line)[0] for line in EXAMPLE_LINES] == [str(code) for code in Code]


@pytest.mark.parametrize("code", Code)
def test_the_example_is_what_is_said(code: Code, folder: Path) -> None:
    reason = EXAMPLES[code](folder)
    assert reason.code == code
    assert str(reason) in EXAMPLE_LINES
