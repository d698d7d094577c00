"""The native CPU kernel: many rows, threads, scattered rows, bounds; and what happens without it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lora_cases import WAYS, check_apply, extents, make_step, random_layer

from lora_plugin import kernels
from lora_plugin.kernels import Batch, choose, reference
from lora_plugin.kernels.native import build, library

NATIVE = WAYS["native"]
DTYPES = (torch.bfloat16, torch.float32)
AMX_IN_SOFTWARE = Path(__file__).with_name("amx_in_software.h")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)
    kernels.unregister_all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("rows", [23, 24, 33, 64, 70, 530])
def test_rows_that_fill_no_block(rows: int, rank: int, dtype: torch.dtype) -> None:
    first_rows, ranks, arena_rows = extents((8, rank), gap=8)
    affine = np.array([0, 1])
    adapters, counts = np.array([-1, 1, 0]), np.array([3, rows, 1])
    step = make_step(adapters, counts, first_rows, ranks, arena_rows, dtype, NATIVE, affine)
    for inputs, widths in ((64, (320,)), (37, (31, 65))):
        weights = random_layer(first_rows, ranks, arena_rows, inputs, widths, dtype, affine=affine)
        check_apply(step, weights, kernels.register(weights, step.batch))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_work(threads: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(threads)
    first_rows, ranks, arena_rows = extents((5, 24, 64), gap=8)
    affine = np.array([1, 0, 1])
    adapters, counts = np.array([0, 1, -1, 2, 1, 0]), np.array([1, 60, 2, 7, 45, 1])
    step = make_step(adapters, counts, first_rows, ranks, arena_rows, dtype, NATIVE, affine)
    for inputs, widths in ((576, (576, 192, 192)), (96, (40,))):
        weights = random_layer(first_rows, ranks, arena_rows, inputs, widths, dtype, affine=affine)
        check_apply(step, weights, kernels.register(weights, step.batch))


def test_an_adapter_s_scattered_rows_are_one_chunk() -> None:
    first_rows, ranks, arena_rows = extents((16, 8))
    step = make_step(
        np.array([0, 1, -1] * 70), np.ones(210, int), first_rows, ranks, arena_rows, torch.bfloat16, NATIVE
    )
    weights = random_layer(first_rows, ranks, arena_rows, 64, (64,), torch.bfloat16)
    check_apply(step, weights, kernels.register(weights, step.batch))


def test_rows_may_be_strided_and_are_checked() -> None:
    first_rows, ranks, arena_rows = extents((8,))
    step = make_step(np.array([0]), np.array([70]), first_rows, ranks, arena_rows, torch.bfloat16, NATIVE)
    weights = random_layer(first_rows, ranks, arena_rows, 64, (32,), torch.bfloat16)
    handle = kernels.register(weights, step.batch)
    y, x = torch.randn(70, 96).bfloat16(), torch.randn(70, 128).bfloat16()
    whole, part = y.clone(), x[:, 32:96]
    expected = reference.lora_apply(y[:, 32:64], part, weights, step.rows)
    torch.ops.lora_plugin.lora_apply(y[:, 32:64], part, handle)
    torch.testing.assert_close(y[:, 32:64].double(), expected, rtol=1e-2, atol=3e-2)
    whole[:, 32:64] = y[:, 32:64]
    assert torch.equal(y, whole)
    for wrong_y, wrong_x in ((y[:69, :32], x[:, :64]), (y[:, :32], x[:69, :64]), (y[:, ::3], x[:, :64])):
        with pytest.raises(ValueError, match="70 contiguous rows"):
            torch.ops.lora_plugin.lora_apply(wrong_y, wrong_x, handle)


def test_an_id_that_a_has_no_column_for_has_no_share() -> None:
    first_rows, ranks, arena_rows = extents((8,))
    step = make_step(np.array([0]), np.array([3]), first_rows, ranks, arena_rows, torch.float32, NATIVE)
    weights = random_layer(first_rows, ranks, arena_rows, 50, (12,), torch.float32, "embedding")
    y = torch.zeros(3, 12)
    torch.ops.lora_plugin.lora_embed(y, torch.tensor([50, 7, -1]), kernels.register(weights, step.batch))
    assert y.any(dim=1).tolist() == [False, True, False]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Nothing built or loaded yet, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    library._load.cache_clear()
    library.usable.cache_clear()
    yield monkeypatch
    library._load.cache_clear()
    library.usable.cache_clear()


@pytest.mark.parametrize("threads", [1, 3])
def test_amx_in_software(threads: int, fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(build, "FLAGS", (*build.FLAGS, "-include", str(AMX_IN_SOFTWARE)))
    torch.set_num_threads(threads)
    for rows, rank in ((24, 1), (33, 16), (64, 17), (65, 40), (530, 32)):
        first_rows, ranks, arena_rows = extents((8, rank))
        adapters, counts = np.array([-1, 1, 0]), np.array([3, rows, 1])
        step = make_step(adapters, counts, first_rows, ranks, arena_rows, torch.bfloat16, NATIVE)
        for inputs, widths in ((64, (320,)), (37, (31, 65)), (96, (32, 32, 64))):
            weights = random_layer(first_rows, ranks, arena_rows, inputs, widths, torch.bfloat16)
            check_apply(step, weights, kernels.register(weights, step.batch))


def check_falls_back(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """`auto` computes with torch and says why, once; `native` is refused with the same reason."""
    with caplog.at_level(logging.INFO, logger="lora_plugin.kernels"):
        for _ in range(2):
            assert Batch(8, 8, 8, 64, "cpu", torch.bfloat16).kernels == "torch"
    (message,) = [record.getMessage() for record in caplog.records]
    assert reason in message
    with pytest.raises(ValueError, match="'native' cannot be had on cpu") as raised:
        choose("native", "cpu", torch.bfloat16)
    assert reason in str(raised.value)


def test_no_compiler(fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fresh.setenv("PATH", "")
    check_falls_back("no C++ compiler", caplog)


@pytest.mark.parametrize(
    ("command", "reason"), [("false", "false failed"), ("/no/such/cxx", "cannot be run")]
)
def test_a_compiler_that_fails(
    command: str, reason: str, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setenv("CXX", command)
    check_falls_back(reason, caplog)


def test_a_source_that_does_not_compile(
    fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("#error not for this CPU\n")
    fresh.setattr(build, "SOURCE", broken)
    check_falls_back("failed", caplog)
    assert not list((tmp_path / "vllm-lora-plugin").iterdir())


def make_readable(folder: Path) -> None:
    folder.mkdir(mode=0o755)


def make_file(folder: Path) -> None:
    folder.write_text("")


def make_link(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)


@pytest.mark.parametrize("make", [make_readable, make_file, make_link])
def test_a_cache_folder_that_is_not_the_user_s_alone(
    make: object, fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(make)
    make(tmp_path / "vllm-lora-plugin")
    check_falls_back("vllm-lora-plugin", caplog)


def test_float16_is_left_to_torch() -> None:
    assert choose("auto", "cpu", torch.float16) == "torch"
    with pytest.raises(ValueError, match="float16"):
        choose("native", "cpu", torch.float16)


def test_it_is_built_once_and_a_broken_library_is_a_reason(
    fresh: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled: list[Path] = []

    def compile_nothing(compiler: list[str], target: Path) -> None:
        compiled.append(target)
        target.write_bytes(b"no library")

    fresh.setattr(build, "find_compiler", lambda: ["true"])
    fresh.setattr(build, "_compile", compile_nothing)
    assert build.build() == build.build()
    assert len(compiled) == 1
    assert compiled[0].parent.stat().st_mode & 0o777 == 0o700
    check_falls_back("cannot be loaded", caplog)
