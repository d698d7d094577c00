"""A store behind the watched directory: an adapter that is asked for and not there is fetched from it.

    export LORA_STORE=/mnt/adapters
    export LORA_PLUGIN_HOOKS=store PYTHONPATH=examples/hooks

A directory stands in for a bucket: list and copy become S3's `list_objects_v2` and `download_file`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_plugin.hooks import Source, hookimpl

STORE = Path(os.environ["LORA_STORE"])
WANTED = ("adapter_config.json", "*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class StoredAdapter:
    """The objects under one prefix of the store."""

    prefix: Path

    @property
    def description(self) -> str:
        return f"store:{self.prefix.name}"

    def fetch(self, destination: Path) -> None:
        for item in self.objects():
            shutil.copyfile(item, destination / item.name)

    def objects(self) -> Iterator[Path]:
        for pattern in WANTED:
            yield from self.prefix.glob(pattern)


@hookimpl
def resolve_source(name: str) -> Source | None:
    # A valid adapter name: it cannot lead out of the store.
    stored = StoredAdapter(STORE / name)
    return stored if any(stored.objects()) else None
