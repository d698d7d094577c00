"""Compositions follow their parts: each content is a version, staged once, and let go when it is old."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest
from catalog_samples import Bench, MemoryLink, write_adapter

from lora_plugin.composition import parts_of
from lora_plugin.directory.entry import Version
from lora_plugin.errors import AdapterNotFound, AdapterRejected, BadRequest, Code, Reason, Unavailable
from lora_plugin.hooks import Part
from lora_plugin.readiness.staging import StageStatus
from lora_plugin.routing import composer
from lora_plugin.routing.composer import Composer

MIX = (Part("a", None, 0.7), Part("b", None, -0.3))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path / "adapters")
    for seed, name in enumerate("ab"):
        write_adapter(bench.root / name, seed)
    bench.settle()
    return bench


async def at_once(version_id: int) -> None:
    """No response uses any version."""


def run(
    bench: Bench,
    link: MemoryLink,
    work: Callable[[Composer], Coroutine[Any, Any, Any]],
    ended: Callable[[int], Awaitable[None]] = at_once,
    timeout: float = 5.0,
) -> Any:
    async def main() -> Any:
        async def version_of(name: str) -> Version:
            return bench.catalog.version_of(name)

        composing = Composer(
            bench.catalog, version_of, link, ended, settle_seconds=0.01, max_rank=16, timeout=timeout
        )
        try:
            result = await work(composing)
            await asyncio.sleep(0.01)
            return result
        finally:
            composing.stop()

    return asyncio.run(main())


def test_many_requests_one_staging(bench: Bench) -> None:
    link = MemoryLink(3)
    specs = run(bench, link, lambda c: asyncio.gather(*(c.ensure("mix", MIX) for _ in range(20))))
    assert len(set(specs)) == 1
    assert link.started == [specs[0].id]
    assert specs[0].name == "mix"
    sources = parts_of(specs[0].path)
    assert [(source.path, source.weight) for source in sources] == [
        (str(bench.root / "a"), 0.7),
        (str(bench.root / "b"), -0.3),
    ]
    assert sources[0].digest == bench.catalog.version_of("a").digest


def test_the_version_is_that_of_contents_and_weights(bench: Bench) -> None:
    async def work(composing: Composer) -> list[str]:
        spelled = [MIX, MIX, (Part("a"), Part("b")), (Part("b"), Part("a")), (Part("a", None, 0.5),)]
        return [(await composing.ensure("mix", parts)).digest for parts in spelled]

    first, again, *others = run(bench, MemoryLink(1), work)
    assert first == again
    assert len({first, *others}) == 4


def test_an_update_of_a_part_is_a_new_version_and_the_old_one_is_let_go(bench: Bench) -> None:
    link = MemoryLink(1)
    using = asyncio.Event()

    async def work(composing: Composer) -> tuple[Any, Any]:
        before = await composing.ensure("mix", MIX)
        write_adapter(bench.root / "b", seed=7)
        bench.settle()
        after = await composing.ensure("mix", MIX)
        await asyncio.sleep(0.01)
        assert link.released == []
        using.set()
        return before, after

    async def when_set(version_id: int) -> None:
        await using.wait()

    before, after = run(bench, link, work, when_set)
    assert before.id != after.id
    assert link.released == [before.id]


def test_ranks_that_add_up_to_too_much(bench: Bench) -> None:
    parts = tuple(Part("a") for _ in range(5))
    with pytest.raises(BadRequest) as error:
        run(bench, MemoryLink(), lambda c: c.ensure("five", parts))
    assert error.value.code is Code.RANK_TOO_LARGE
    assert "4 + 4 + 4 + 4 + 4 = 20" in str(error.value)


@pytest.mark.parametrize("part", [Part("nobody"), Part("a", "0000000")])
def test_a_part_that_is_not_there(bench: Bench, part: Part) -> None:
    with pytest.raises(AdapterNotFound):
        run(bench, MemoryLink(), lambda c: c.ensure("mix", (part, Part("b"))))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (Code.FEATURE_UNSUPPORTED, AdapterRejected),
        (Code.NOT_FINITE, AdapterRejected),
        (Code.CHANGED, Unavailable),
        (Code.HOST_CACHE_FULL, Unavailable),
    ],
)
def test_failures_reach_the_request_and_no_adapter(bench: Bench, code: Code, error: type[Exception]) -> None:
    link = MemoryLink()
    link.answer = lambda spec: StageStatus("failed", Reason(code, "no"))
    with pytest.raises(error, match="no"):
        run(bench, link, lambda c: c.ensure("mix", MIX))
    assert {adapter.state for adapter in bench.catalog.list()} == {"listed"}


def scanning_later(bench: Bench) -> Callable[..., float | None]:
    """The catalog's `scan` with a second before each."""
    scan = bench.catalog.scan

    def scan_later(names: Iterable[str] | None = None) -> float | None:
        bench.clock.now += 1
        return scan(names)

    return scan_later


def test_a_part_that_was_replaced_before_its_digest_was_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(bench.root / "b", seed=7)
    with pytest.raises(Unavailable) as error:
        run(bench, MemoryLink(1), lambda c: c.ensure("mix", MIX))
    assert error.value.code is Code.CHANGED
    monkeypatch.setattr(bench.catalog, "scan", scanning_later(bench))
    spec = run(bench, MemoryLink(1), lambda c: c.ensure("mix", MIX))
    assert parts_of(spec.path)[1].digest == bench.catalog.version_of("b").digest


def test_a_part_that_is_being_replaced_is_looked_at_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines find other bytes than the catalog knows: it looks, and the new version is composed."""
    link = MemoryLink(1)
    monkeypatch.setattr(bench.catalog, "scan", scanning_later(bench))
    before = bench.catalog.version_of("b").digest

    def answer(spec: Any) -> StageStatus | None:
        if before not in spec.path:
            return None
        write_adapter(bench.root / "b", seed=7)
        return StageStatus("failed", Reason(Code.CHANGED, "another version"))

    link.answer = answer
    spec = run(bench, link, lambda c: c.ensure("mix", MIX))
    assert before not in spec.path
    assert link.released == [link.started[0]]


def test_nobody_waits_for_ever(bench: Bench) -> None:
    link = MemoryLink()
    link.open.clear()
    with pytest.raises(Unavailable, match="within"):
        run(bench, link, lambda c: c.ensure("mix", MIX), timeout=0.05)


def test_clients_cannot_fill_the_engines_with_names(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composer, "_KEPT", 3)
    link = MemoryLink(1)

    async def work(composing: Composer) -> list[int]:
        return [(await composing.ensure(f"a*{i}", (Part("a", None, float(i)),))).id for i in range(1, 8)]

    ids = run(bench, link, work)
    assert link.released == ids[:4]
