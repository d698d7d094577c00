"""The routing files of the document can be used as they are printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from documents import DOCS, section

from lora_plugin.routing.aliases import parse_aliases
from lora_plugin.routing.compositions import parse_compositions
from lora_plugin.strict_yaml import read_yaml


@pytest.mark.parametrize(
    ("title", "parse", "names"),
    [
        ("Aliases", parse_aliases, {"prod", "last-week", "maintenance", "law", "support"}),
        ("Compositions", parse_compositions, {"polite-sql", "mixed"}),
    ],
)
def test_examples_can_be_used(title: str, parse: Callable[..., Any], names: set[str]) -> None:
    lines = section(DOCS / "routing.md", title).splitlines()
    block = "\n".join(line[4:] for line in lines if line.startswith("    "))
    assert set(parse(read_yaml(block.encode()), ("base-model",))) == names
