"""The strict interpreter fails where a GPU would."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton_strict import interpreted


@triton.jit
def narrow(x: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))


@triton.jit
def add(x: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) + tl.load(x + i))


@triton.jit
def product(x: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    tl.store(out + square, tl.dot(tl.load(x + square), tl.load(x + square), input_precision="ieee"))


@triton.jit
def unfilled(x: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i, mask=i < N // 2))


@triton.jit
def everywhere(x: tl.tensor, out: tl.tensor, N: tl.constexpr) -> None:
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i))


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with interpreted(sys.modules[__name__]):
        yield


def test_a_cast_to_bfloat16_rounds() -> None:
    x, out = torch.randn(64), torch.empty(64, dtype=torch.bfloat16)
    narrow[(1,)](x, out, N=64)
    assert torch.equal(out, x.bfloat16())


def test_a_dot_of_bfloat16_is_one() -> None:
    x, out = torch.randn(16, 16).bfloat16(), torch.empty(16, 16)
    product[(1,)](x, out, N=16)
    torch.testing.assert_close(out, x.float() @ x.float())


def test_a_missing_other_is_nan() -> None:
    out = torch.zeros(16)
    unfilled[(1,)](torch.ones(16), out, N=16)
    assert out[:8].eq(1).all()
    assert out[8:].isnan().all()


@pytest.mark.parametrize(
    ("name", "x", "size", "grid", "words"),
    [
        ("add", torch.ones(16).bfloat16(), 16, 1, "arithmetic in bfloat16"),
        ("add", torch.full((16,), 2**30, dtype=torch.int32), 16, 1, "int32 add"),
        ("product", torch.randn(8, 8), 8, 1, "no GPU has a dot"),
        ("everywhere", torch.ones(15), 16, 1, "1 of 16 addresses"),
        ("everywhere", torch.ones(16), 16, 2, "two stores"),
    ],
)
def test_faults_are_errors(name: str, x: torch.Tensor, size: int, grid: int, words: str) -> None:
    out = torch.empty(size * size, dtype=x.dtype)
    with pytest.raises((InterpreterError, RuntimeError), match=words):
        getattr(sys.modules[__name__], name)[(grid,)](x, out, N=size)
