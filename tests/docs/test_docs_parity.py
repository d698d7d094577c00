"""docs/parity.md: the matrix that the tests have, with nothing that failed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from documents import DOCS, rows

# The matrix and what it is made of are those of its own tests.
sys.path.append(str(Path(__file__).parents[1] / "serving"))
sys.path.append(str(Path(__file__).parents[1] / "parity"))

from architectures import ARCHITECTURES
from table import COLUMNS, FAILS

PAGE = DOCS / "parity.md"


def test_the_rows_and_columns_are_those_of_the_tests() -> None:
    table = rows(PAGE.read_text())
    assert [row[0].strip("*") for row in table] == list(ARCHITECTURES)
    assert all(len(row) == len(COLUMNS) + 1 for row in table)
    assert f"| model | {' | '.join(COLUMNS)} |" in PAGE.read_text()


def test_every_cell_that_was_run_is_right_or_refused() -> None:
    cells = [cell for row in rows(PAGE.read_text()) for cell in row[1:] if cell]
    assert FAILS not in cells
    assert all(re.fullmatch(r"\de-\d\d( \(\d+\.\d\))?|`[a-z-]+`|-", cell) for cell in cells)
    assert sum(cell[0].isdigit() for cell in cells) >= 60
