from __future__ import annotations

from pathlib import Path

import pytest
from catalog_samples import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    root = tmp_path / "adapters"
    root.mkdir()
    return Bench(root)
