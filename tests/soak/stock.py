"""The adapters of the soak: many contents, their answers known, and what is done to their folders."""

from __future__ import annotations

import random
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import make_adapter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
RANKS = (1, 5, 8, 16, 24, 33, 64)
GRACE_SECONDS = 15.0
"""For so long after a folder was touched its requests may be refused."""


def make_contents(root: Path, model: Path, names: int) -> dict[str, list[Path]]:
    """Two contents of one rank for each name: PEFT's files, with random values of their own."""
    templates = {rank: make_adapter(root / f"rank{rank}", model, seed=rank, rank=rank) for rank in RANKS}
    contents: dict[str, list[Path]] = {}
    for number in range(names):
        template = templates[RANKS[number % len(RANKS)]]
        contents[f"n{number:02}"] = [
            _vary(template, root / f"n{number:02}-{version}", seed=2 * number + version) for version in (0, 1)
        ]
    return contents


def _vary(template: Path, target: Path, seed: int) -> Path:
    shutil.copytree(template, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(template / WEIGHTS)
    shuffled = {
        name: t.flatten()[torch.randperm(t.numel(), generator=generator)].view(t.shape)
        for name, t in tensors.items()
    }
    save_file(shuffled, target / WEIGHTS, metadata={"format": "pt"})
    return target


@dataclass
class Folder:
    """What was done to a name last.

    Attributes:
        whole: whether there is a good adapter in it that may be served.
        touched_at: monotonic seconds.
    """

    whole: bool = False
    touched_at: float = field(default_factory=time.monotonic)


class Stock:
    """The watched directory, as one thread changes it; the clients ask what may be refused.

    Args:
        directory: the watched one.
        contents: name -> folders, any of which may be served under the name.
        chance: decides what happens.
    """

    def __init__(self, directory: Path, contents: dict[str, list[Path]], chance: random.Random) -> None:
        self.directory = directory
        self.contents = contents
        self.folders = {name: Folder() for name in contents}
        self._chance = chance
        self._lock = threading.Lock()

    def may_be_refused(self, name: str, since: float) -> bool:
        """Whether a request of this name that began then may have met something other than a whole folder."""
        with self._lock:
            folder = self.folders[name]
            return not folder.whole or folder.touched_at + GRACE_SECONDS > since

    def touch(self, name: str, *, whole: bool) -> None:
        with self._lock:
            self.folders[name] = Folder(whole)

    def fill(self) -> None:
        """Every name is there again, with one of its contents."""
        for name in self.contents:
            self.replace(name)

    def replace(self, name: str) -> None:
        """Another content, renamed into place."""
        self.touch(name, whole=True)
        source = self._chance.choice(self.contents[name])
        fresh = self.directory / f".{name}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(source, fresh)
        shutil.rmtree(self.directory / name, ignore_errors=True)
        fresh.rename(self.directory / name)
        self.touch(name, whole=True)

    def overwrite(self, name: str) -> None:
        """Another content, written over the old file as `cp` does."""
        if not self.folders[name].whole:
            self.replace(name)
            return
        self.touch(name, whole=True)
        source = self._chance.choice(self.contents[name])
        shutil.copyfile(source / WEIGHTS, self.directory / name / WEIGHTS)
        self.touch(name, whole=True)

    def delete(self, name: str) -> None:
        self.touch(name, whole=False)
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def cut(self, name: str) -> None:
        """The weights become half of what they were."""
        self.touch(name, whole=False)
        weights = self.directory / name / WEIGHTS
        if weights.exists():
            weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])

    def spoil(self, name: str) -> None:
        """A number that is none, in a file that is otherwise right."""
        self.touch(name, whole=False)
        weights = self.directory / name / WEIGHTS
        if weights.exists():
            data = bytearray(weights.read_bytes())
            data[-4:] = b"\x00\x00\xc0\x7f"
            weights.write_bytes(data)

    def scribble(self, name: str) -> None:
        self.touch(name, whole=False)
        if (self.directory / name).exists():
            (self.directory / name / CONFIG).write_text("{")
