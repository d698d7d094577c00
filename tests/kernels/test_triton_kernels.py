"""The Triton kernels in a strict interpreter, against float64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from triton.runtime.errors import InterpreterError
from triton_layers import CPU, Step, Subject, assert_close, expand, layer, shrink
from triton_strict import interpreted

from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.runs import sort_by_adapter
from lora_plugin.kernels.triton.layer import DeviceLayer
from lora_plugin.kernels.triton.tiles import DeviceTiles

MIXED = (1, 4, 8, 24, 64, 128)
EMPTY = Step((), ())


@pytest.mark.parametrize(
    ("dtype", "ranks", "in_features", "widths", "step"),
    [
        pytest.param(torch.bfloat16, (8,), 64, (48,), Step((0,), (1,)), id="one row"),
        pytest.param(torch.float32, (1, 4, 24), 300, (70, 30), Step((2, -1, 0), (1, 1, 1)), id="3 rows"),
        pytest.param(torch.float16, MIXED, 4200, (33, 8), Step((1, 5, -1, 3), (1,) * 4), id="4 rows"),
        pytest.param(
            torch.bfloat16,
            MIXED,
            200,
            (160, 48, 48),
            Step((3, -1, 0, 5, 1, 4, -1, 2, 3), (7,) * 9),
            id="63 rows",
        ),
        pytest.param(torch.float16, (24, 8), 76, (33,), Step((1, 0, -1, 1), (40, 50, 20, 20)), id="130 rows"),
        pytest.param(
            torch.bfloat16, (24, 128), 136, (96, 40), Step((1, -1, 0), (150, 20, 130)), id="300 rows"
        ),
        pytest.param(torch.float32, (1, 8) * 32, 64, (48,), Step(range(64), (1,) * 64), id="64 adapters"),
        pytest.param(torch.bfloat16, (8, 8), 64, (48,), Step((-1, -1), (3, 5)), id="base only"),
        pytest.param(torch.bfloat16, (8, 8), 64, (48,), EMPTY, id="no rows"),
    ],
)
def test_linear(
    dtype: torch.dtype, ranks: tuple[int, ...], in_features: int, widths: tuple[int, ...], step: Step
) -> None:
    Subject(ranks, in_features, widths, dtype).check(step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [4, 20, 300])
def test_a_gain_and_a_shift(rows: int, dtype: torch.dtype) -> None:
    """Of two adapters; a plain one and base rows between stay what they are without."""
    step = _quarters(rows)
    Subject((8, 4, 24), 136, (70, 32), dtype, affine=(0, 1)).check(step)
    Subject((4, 24, 40), 101, (72,), dtype, kind="embedding", affine=(1, 2)).check(step)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942", "other"])
def test_every_table_gives_the_same(arch: str) -> None:
    Subject((24, 4), 288, (160,), torch.bfloat16, arch=arch).check(Step((1, 0, -1), (3, 18, 2)))


def test_the_largest_step_is_not_split() -> None:
    subject = Subject((8,), 80, (48,), torch.bfloat16, max_tokens=5000)
    subject.check(Step((-1, 0, -1, 0), (900, 70, 3130, 30)))


@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float16, 4), (torch.bfloat16, 20), (torch.float32, 300)], ids=str
)
def test_embedding(dtype: torch.dtype, rows: int) -> None:
    Subject((4, 24, 64), 501, (72,), dtype, kind="embedding").check(_quarters(rows))


def _quarters(rows: int) -> Step:
    """Two of one adapter, one of another; the last of base rows and a third."""
    return Step((1, -1, 2, 0), (rows // 2, 1, rows // 4, rows - rows // 2 - rows // 4 - 1))


def test_padding_rows_belong_to_nobody() -> None:
    subject = Subject((8, 24), 64, (48,), torch.bfloat16)
    subject.check(Step((0, 1), (3, 2)), rows=24)
    subject.check(Step((1, 0), (2, 1)), rows=4)


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        (40, (Step((0, -1, 1), (10, 5, 20)), Step((2, 0, 1, 2), (1, 2, 3, 4)), Step((-1,), (7,)))),
        (4, (Step((0, 1), (3, 1)), Step((2, -1, 0), (1, 1, 1)), Step((-1,), (4,)))),
    ],
    ids=["tiles", "single rows"],
)
def test_a_captured_launch_serves_any_step(rows: int, steps: tuple[Step, ...]) -> None:
    """A replay repeats the launches exactly; only the buffer has changed."""
    subject = Subject((8, 24, 64), 64, (48, 32), torch.bfloat16)
    y, x = subject.inputs(rows)
    address = subject.tiles.buffer.data_ptr()
    launches = []
    for step in steps:
        base = y.clone(memory_format=torch.preserve_format)
        subject.set_step(step)
        launches.append(subject.run(y, x).launches)
        assert_close(y, subject.expected(base, x, step))
    assert launches[0] == launches[1] == launches[2]
    assert len(launches[0]) == 2
    assert subject.tiles.buffer.data_ptr() == address


def test_results_repeat_and_do_not_depend_on_neighbours() -> None:
    subject = Subject((8, 24), 520, (48,), torch.bfloat16)
    y, x = subject.inputs(12)
    results = []
    for step in (Step((0, 1), (8, 4)), Step((0, 1), (8, 4)), Step((0, -1), (8, 4))):
        result = y.clone()
        subject.set_step(step)
        subject.run(result, x)
        results.append(result)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0][:8], results[2][:8])


def test_addresses_past_two_to_the_31() -> None:
    _check_far()


def _check_far() -> None:
    """A, B, x and y beyond 2^31 elements; untouched pages take no memory."""
    rows, features, first, rank = 2**21 + 64, 1040, 2**21 + 40, 8
    owned = slice(first, first + rank)
    a, b = _reserve(rows, 1, features), _reserve(rows, features)
    x, y = (_reserve(18, 2**27)[:, :features] for _ in range(2))
    a[owned], b[owned] = torch.randn(rank, 1, features).half(), torch.randn(rank, features).half()
    x[17] = torch.randn(features).half()
    tiles = DeviceTiles(32, 2, rank, CPU)
    device_layer = DeviceLayer(LayerWeights(a, (b,)), tiles, "sm_90")
    tiles.update(sort_by_adapter(np.array([-1, 0]), np.array([17, 1]), np.array([first]), np.array([rank])))
    with interpreted(layer.shrinking, layer.expanding) as builder:
        builder.allow(b)
        device_layer(y, x)
    assert_close(y[17:], (x[17].double() @ a[owned, 0].double().T @ b[owned].double())[None])


def _reserve(*shape: int) -> torch.Tensor:
    """float16 zeros whose pages exist once they are written."""
    return torch.from_numpy(np.zeros(shape, np.float16))


@pytest.mark.parametrize(
    ("y", "x", "words"),
    [
        (torch.zeros(2, 48), torch.zeros(2, 63), "shape"),
        (torch.zeros(2, 47), torch.zeros(2, 64), "shape"),
        (torch.zeros(48, 2).t(), torch.zeros(2, 64), "contiguous"),
        (torch.zeros(2, 48), torch.zeros(2, 64).half(), "float16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(y: torch.Tensor, x: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Subject((8,), 64, (48,), torch.float32).layer(y, x)


MUTANTS = {
    "a neighbour's B": (expand, "b_mask = (ranks < rank)[:, None] & in_slice", "b_mask = in_slice"),
    "unwritten planes": (
        expand,
        "written = in_tile & (ranks < (rank + 15) // 16 * 16)[None, :]",
        "written = in_tile",
    ),
    "a lost plane": (expand, "static_range(1, SPLIT)", "static_range(2, SPLIT)"),
    "a stale tile": (shrink, "live = index < tl.load(count)", "live = index < 100"),
    "columns of the next slice": (
        expand,
        "mask = in_tile & in_slice",
        "mask = in_tile & (n < 100000)[None, :]",
    ),
    "rows of nobody": (expand, "mask = in_tile & in_slice", "mask = (m < 16)[:, None] & in_slice"),
    "past the end of x": (shrink, "x_mask = in_tile & (k + d < in_features)[None, :]", "x_mask = in_tile"),
    "another order": (shrink, "x_stride, rows + position,", "x_stride, rows,"),
    "no other": (shrink, "mask=a_mask, other=0.0)", "mask=a_mask)"),
    "a gain before its row": (expand, "b_tile + rank * width + n", "b_tile + (rank - 1) * width + n"),
    "a gain for all": (expand, "if is_affine(count, records, tl.program_id(0))", "if rank > 0"),
    "truncated rank": (shrink, "chunks = (rank + RANKS - 1) // RANKS", "chunks = rank // RANKS"),
}


NARROW = {
    "A": (shrink, "first_row.to(tl.int64) * a_stride"),
    "x": (shrink, "row.to(tl.int64)[:, None] * stride"),
    "B": (expand, "first_row.to(tl.int64) * width"),
}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_addresses_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, wide = NARROW[name]
    _mutate(module, wide, wide.replace(".to(tl.int64)", ""), tmp_path, monkeypatch)
    with pytest.raises(InterpreterError, match="int32 multiply"):
        _check_far()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new = MUTANTS[name]
    _mutate(module, old, new, tmp_path, monkeypatch)
    subject = Subject((24, 4, 40), 600, (40, 30), torch.bfloat16, affine=(2,))
    with pytest.raises(Exception, match=r"off by|outside|two stores|assert"):
        _check_each(subject, Step((0, 1, 2), (6, 3, 3)), Step((2, 0), (3, 4)), Step((2, -1, 0), (3, 2, 260)))


def _check_each(subject: Subject, *steps: Step) -> None:
    for step in steps:
        subject.check(step)


def _mutate(module: ModuleType, old: str, new: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes layers launch the kernels of `module` with one piece of source replaced."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert old in source
    path = folder / "mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    patch.setattr(layer, "shrinking" if module is shrink else "expanding", mutant)


def test_halves_are_the_whole() -> None:
    """Shrink before y is there, expand into it afterwards; to the bit what one call makes."""
    subject = Subject((8, 24), 136, (70, 32), torch.bfloat16)
    subject.set_step(Step((1, -1, 0), (20, 3, 40)))
    y, x = subject.inputs(63)
    whole = y.clone()
    subject.run(whole, x)
    subject.tiles.scratch.planes.fill_(torch.nan)
    with interpreted(layer.shrinking, layer.expanding) as builder:
        builder.allow(*subject.weights.b)
        subject.layer.shrink(x)
        subject.layer.expand(y)
    assert torch.equal(y, whole)
    with pytest.raises(ValueError, match="x "):
        subject.layer.shrink(x[:, :8])
    with pytest.raises(ValueError, match="columns"):
        subject.layer.expand(y[:, :8])


def test_after_the_device_lost_its_memory() -> None:
    """Constants are written again, and the step is an empty one whatever the buffer holds."""
    subject = Subject((4, 24), 101, (72, 40), torch.float32)
    step = Step((1, -1, 0), (3, 2, 4))
    subject.check(step)
    subject.tiles.buffer.fill_(7)
    subject.layer._slices.fill_(-1)
    subject.tiles.restore()
    y, x = subject.inputs(9)
    before = y.clone()
    subject.run(y, x)
    assert torch.equal(y, before)
    subject.check(step)
