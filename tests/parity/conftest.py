from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

# Servers and the tokenizer are those of the serving tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))
sys.path.insert(0, str(Path(__file__).parent))

from architectures import ARCHITECTURES
from asking import Asked, ask_offline, ask_server


@pytest.fixture(scope="session")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Asked]:
    """An architecture by its name, asked for everything at the first call; a failure is not tried again.

    The whole matrix is asked without servers, the part of it in `make test` through real ones.
    """
    way = ask_offline if "PARITY_TABLE" in os.environ else ask_server

    @cache
    def once(name: str) -> Asked | Exception:
        try:
            return way(ARCHITECTURES[name], tmp_path_factory.mktemp("parity"))
        except Exception as error:
            return error

    def ask(name: str) -> Asked:
        if isinstance(asked := once(name), Exception):
            raise asked
        return asked

    return ask
