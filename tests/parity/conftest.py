from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# Servers and the tokenizer are those of the serving tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
sys.path.insert(0, str(Path(__file__).parent))

from architectures import ARCHITECTURES
from asking import Asked, ask_server


@pytest.fixture(scope="session")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Asked]:
    """An architecture by its name, asked for everything at the first call."""
    return cache(lambda name: ask_server(ARCHITECTURES[name], tmp_path_factory.mktemp("parity")))
