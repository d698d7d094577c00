"""A local Hub, and the client of this process turned to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "catalog"))

from local_hub import LocalHub, Repository

import lora_plugin.hub.client


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """Empty; the client has an empty cache and is not patient."""
    with LocalHub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
        monkeypatch.setattr(lora_plugin.hub.client, "_PAUSES", (0.01, 0.01))
        yield running


@pytest.fixture
def repository(hub: LocalHub) -> Repository:
    """org/name: an adapter of two files, a pickle beside it, and another in a folder."""
    files = {
        "adapter_config.json": json.dumps({"peft_type": "LORA", "r": 8}).encode(),
        "adapter_model.safetensors": b"w" * 5000,
        "adapter_model.bin": b"p" * 100,
        "README.md": b"# words",
        "deep/er/adapter_config.json": b"{}",
        "deep/er/adapter_model.safetensors": b"v" * 3000,
    }
    return hub.repositories.setdefault("org/name", Repository(files))
