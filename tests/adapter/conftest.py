from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from adapter_samples import llama_layout, train

from lora_plugin.layout import ModelLayout


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good adapter on q_proj and v_proj, r=8, alpha=16; not to be written to."""
    folder = tmp_path_factory.mktemp("saved") / "good"
    train().save_pretrained(str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    """A copy of the good adapter, named "good", alone in a directory that may be the watched one."""
    root = tmp_path / "adapters"
    root.mkdir()
    shutil.copytree(saved, root / "good")
    return root / "good"


@pytest.fixture
def layout() -> ModelLayout:
    return llama_layout()
