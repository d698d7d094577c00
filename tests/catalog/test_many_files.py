"""A folder full of other files: changes to the adapter's own are still noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_plugin.directory.folders import AdapterFolders
from lora_plugin.layout import ModelLayout


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_update_behind_a_thousand_files_changes_the_stamp(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "crowded"
    folder.mkdir()
    for index in range(1200):
        (folder / f"a{index:04}").touch()
    (folder / name).write_bytes(b"old")
    folders = AdapterFolders(tmp_path, ModelLayout((), "float32", 8, {}), taken=(), max_bytes=1 << 20)
    before = folders.stamp("crowded")
    assert before is not None
    (folder / name).write_bytes(b"newer")
    assert folders.stamp("crowded") not in (before, None)
