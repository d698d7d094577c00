"""docs/parity.md: what every cell came to when it was last run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from architectures import ARCHITECTURES, Architecture
from features import FEATURES
from server import BASE

COLUMNS: Final = (BASE, *FEATURES)
FAILS: Final = "**fails**"
RATIO: Final = 3
"""Of an error in half precision to that of transformers with PEFT in the same."""

_HEAD: Final = """# Parity

Written by `make parity`. Every row is a tiny random model in a vLLM engine with the plugin, in float32;
every column an adapter that PEFT saved with random, non-zero weights. All adapters of a row and the base
model are asked in one batch, with three prompts of 5, 17 and 40 tokens. A cell is the largest difference to
transformers with PEFT in float32: of a log-probability, for a row of embeddings of one of the vector's
elements; or the code with which the adapter is refused. "-" is for what the model does not have; an empty
cell was not run. The whole matrix runs in engines without a server (`LLM`); without PARITY_TABLE the same
tests ask real servers: the rows in bold do so in `make test`, and those of Llama, Mistral, Phi-3, Qwen2,
Qwen3, Gemma 3 and Llama int8 did on 2026-11-30, 151 cells in all.

In a row that is served in bfloat16 or float16 the number in brackets says how large that difference is beside
the one of transformers with PEFT that computes in the same precision: at most {ratio}.

"""


def render(cells: Mapping[tuple[str, str], str]) -> str:
    """The page for the text of each (architecture, feature); one without is not there."""
    lines: list[tuple[str, ...]] = [("model", *COLUMNS), ("---",) * (len(COLUMNS) + 1)]
    for name, architecture in ARCHITECTURES.items():
        shown = f"**{name}**" if architecture.representative else name
        lines.append(
            (shown, *(cells.get((name, column), _absent(architecture, column)) for column in COLUMNS))
        )
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = "".join(f"- {name}: {a.note}\n" for name, a in ARCHITECTURES.items() if a.note)
    return f"{_HEAD.format(ratio=RATIO)}{table}\n{notes}"


def read(page: str) -> dict[tuple[str, str], str]:
    """The cells of a page, by architecture and feature: what `render` made it of."""
    lines = [line.strip().strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    head, rows = lines[0], lines[2:]
    return {
        (row[0].strip(" *"), column.strip()): cell.strip()
        for row in rows
        for column, cell in zip(head[1:], row[1:], strict=True)
        if cell.strip() not in ("", "-")
    }


def _absent(architecture: Architecture, column: str) -> str:
    return "" if column == BASE or FEATURES[column].fits(architecture) else "-"
