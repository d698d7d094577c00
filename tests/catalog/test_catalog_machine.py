"""Any sequence of copying, overwriting, renaming, deleting and scanning keeps the catalog's promises.

The truth is kept here: which contents each folder ever held whole, and what a quiet folder holds now.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from catalog_samples import CONFIG, LAYOUT, SETTLE, WEIGHTS, Bench, config_bytes, weight_bytes, write_adapter
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import verify
from lora_plugin.errors import AdapterIncomplete, AdapterNotFound, AdapterRejected, Unavailable

names = st.sampled_from(["a", "b"])
seeds = st.integers(0, 2)
BAD = config_bytes(peft_type="IA3")


@cache
def digest_of(seed: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(Path(folder) / "x", seed)
        return verify(Path(folder), "x", inspect(Path(folder), "x", LAYOUT, 1 << 20).snapshot)


class CatalogMachine(RuleBasedStateMachine):
    """A directory that people work in, while the catalog looks at it now and then."""

    @initialize()
    def begin(self) -> None:
        self.temporary = Path(tempfile.mkdtemp())
        self.bench = Bench(self.temporary / "adapters")
        self.bench.root.mkdir()
        self.ever_whole: dict[str, set[str]] = {"a": set(), "b": set()}
        self.ever_bad: set[str] = set()

    def teardown(self) -> None:
        if hasattr(self, "temporary"):
            shutil.rmtree(self.temporary)

    @rule(name=names, seed=seeds, share=st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    def write_weights(self, name: str, seed: int, share: float) -> None:
        whole = weight_bytes(seed)
        self.folder(name).mkdir(exist_ok=True)
        (self.folder(name) / WEIGHTS).write_bytes(whole[: int(len(whole) * share)])

    @rule(name=names, bad=st.booleans(), share=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def write_config(self, name: str, bad: bool, share: float) -> None:
        whole = BAD if bad else config_bytes()
        self.folder(name).mkdir(exist_ok=True)
        (self.folder(name) / CONFIG).write_bytes(whole[: int(len(whole) * share)])

    @rule(name=names, seed=seeds)
    def copy_whole(self, name: str, seed: int) -> None:
        write_adapter(self.folder(name), seed)

    @rule(name=names, seed=seeds)
    def rename_into_place(self, name: str, seed: int) -> None:
        write_adapter(self.temporary / "new", seed)
        self.delete(name)
        (self.temporary / "new").rename(self.folder(name))

    @rule(name=names)
    def delete(self, name: str) -> None:
        shutil.rmtree(self.folder(name), ignore_errors=True)

    @rule(name=names)
    def delete_weights(self, name: str) -> None:
        (self.folder(name) / WEIGHTS).unlink(missing_ok=True)

    @rule(name=names)
    def touch(self, name: str) -> None:
        if (self.folder(name) / WEIGHTS).exists():
            os.utime(self.folder(name) / WEIGHTS)

    @rule()
    def swap(self) -> None:
        a, b, spare = self.folder("a"), self.folder("b"), self.temporary / "spare"
        if a.exists() and b.exists():
            a.rename(spare)
            b.rename(a)
            spare.rename(b)

    @rule(part=st.sampled_from([None, ("a",), ()]), seconds=st.sampled_from([0.0, 0.1, 0.3, 2.0]))
    def look(self, part: tuple[str, ...] | None, seconds: float) -> None:
        self.bench.clock.now += seconds
        self.bench.catalog.scan(part)

    @rule(name=names)
    def use(self, name: str) -> None:
        try:
            version = self.bench.catalog.version_of(name)
        except (AdapterIncomplete, AdapterRejected, AdapterNotFound, Unavailable):
            return
        assert version.digest in self.ever_whole[name]

    @rule()
    def settle(self) -> None:
        """After a quiet while the catalog says exactly what is there."""
        for _ in range(2):
            self.bench.settle(6 * SETTLE)
        for name in self.ever_whole:
            state, seed = self.bench.state(name), self.holds(name)
            if not self.folder(name).exists():
                assert state is None
            elif seed is not None:
                assert self.bench.catalog.version_of(name).digest == digest_of(seed)
            elif self.holds_bad(name):
                assert state in (
                    "rejected",
                    *(() if self.weights(name) is not None else ("settling", "listed")),
                )
            else:
                assert state in ("settling", "listed")
        assert self.bench.catalog.scan() is None

    @invariant()
    def note(self) -> None:
        """Runs after every rule: the truth about contents, and what must never be seen."""
        for name in getattr(self, "ever_whole", ()):
            if (seed := self.holds(name)) is not None:
                self.ever_whole[name].add(digest_of(seed))
            if self.holds_bad(name):
                self.ever_bad.add(name)
            if self.bench.state(name) == "rejected":
                assert name in self.ever_bad
            adapter = self.bench.catalog.get(name)
            if adapter is not None and adapter.version is not None:
                assert adapter.version.digest in self.ever_whole[name]

    def folder(self, name: str) -> Path:
        return self.bench.root / name

    def read(self, name: str, file: str) -> bytes | None:
        path = self.folder(name) / file
        return path.read_bytes() if path.exists() else None

    def holds(self, name: str) -> int | None:
        return self.weights(name) if self.read(name, CONFIG) == config_bytes() else None

    def weights(self, name: str) -> int | None:
        found = self.read(name, WEIGHTS)
        return next((seed for seed in range(3) if found == weight_bytes(seed)), None)

    def holds_bad(self, name: str) -> bool:
        return self.read(name, CONFIG) == BAD


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
