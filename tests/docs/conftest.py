from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

# The adapters that the documents speak of are made as in the adapter tests.
sys.path.append(str(Path(__file__).parents[1] / "adapter"))

from adapter_samples import llama_layout, train

from lora_plugin.layout import ModelLayout


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    """A copy of a good adapter, alone in a directory that may be the watched one."""
    (tmp_path / "adapters").mkdir()
    return shutil.copytree(saved, tmp_path / "adapters" / "good")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    train().save_pretrained(str(root / "good"))
    return root / "good"


@pytest.fixture
def layout() -> ModelLayout:
    return llama_layout()
