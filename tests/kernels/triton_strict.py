"""Triton's interpreter, made to fail where a GPU would.

As shipped it truncates float32 to bfloat16, multiplies bfloat16 as integers, reads and writes anywhere, lets
int32 overflow pass, takes dots that no GPU has, and gives 0 for a masked load without `other`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle


class StrictBuilder(InterpreterBuilder):
    """Checks every access against `memory`, and arithmetic against what the hardware does."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[tuple[int, int]] = []
        self.stored: list[np.ndarray] = []
        self.launches: list[tuple[Any, ...]] = []

    def allow(self, *tensors: torch.Tensor) -> None:
        """Lets kernels touch the memory that these tensors span."""
        for tensor in tensors:
            if tensor.numel():
                last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                start = tensor.data_ptr()
                self.memory.append((start, start + (last + 1) * tensor.itemsize))

    def _check_range(self, pointers: TensorHandle, mask: TensorHandle) -> None:
        live = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))[
            np.broadcast_to(mask.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        ]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(live.shape, bool)
        for low, high in self.memory:
            inside |= (live >= low) & (live + np.uint64(size) <= high)
        if not inside.all():
            raise IndexError(f"{(~inside).sum()} of {inside.size} addresses lie outside of every tensor")
        if (live % size).any():
            raise IndexError("a misaligned address")

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle, other: TensorHandle | None, *rest: Any
    ) -> TensorHandle:
        self._check_range(ptrs, mask)
        # A scalar's other=0 arrives as None too: the interpreter takes it for false.
        if other is None and ptrs.data.size > 1 and not mask.data.all():
            fill = np.zeros(ptrs.data.shape, interpreter._get_np_dtype(ptrs.get_element_ty()))
            fill.view(f"u{fill.itemsize}")[...] = 0x7FC0 << (8 * (fill.itemsize - 2))
            other = TensorHandle(fill, ptrs.get_element_ty())
        return super().create_masked_load(ptrs, mask, other, *rest)

    def create_masked_store(
        self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, policy: Any
    ) -> Any:
        self._check_range(ptrs, mask)
        self.stored.append(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)])
        return super().create_masked_store(ptrs, value, mask, policy)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        if tl.bfloat16 not in (source, target) or source == target:
            return super().cast_impl(src, dst_type)
        if source == tl.bfloat16:
            wide = TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            return super().cast_impl(wide, dst_type)
        rounded = torch.from_numpy(np.array(src.data, np.float32)).bfloat16().view(torch.int16).numpy()
        return TensorHandle(rounded.view(np.uint16), tl.bfloat16)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding: Any) -> TensorHandle:
        return self.cast_impl(src, dst_type)

    def create_dot(
        self, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, *rest: Any
    ) -> Any:
        if min(*a.data.shape, *b.data.shape) < 16:
            raise ValueError(f"no GPU has a dot of {a.data.shape} and {b.data.shape}")
        if a.dtype != b.dtype or (a.dtype == tl.float32 and "IEEE" not in str(precision)):
            raise TypeError(f"a dot of {a.dtype} and {b.dtype} in {precision}")
        wide = [self.cast_impl(operand, tl.float32) for operand in (a, b)]
        return super().create_dot(*wide, d, precision, *rest)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., Any]) -> TensorHandle:
        if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar):
            raise TypeError("arithmetic in bfloat16")
        result = super().binary_op(lhs, rhs, op)
        if lhs.dtype.scalar == tl.int32 and op in (np.add, np.subtract, np.multiply):
            exact = op(lhs.data.astype(np.int64), rhs.data.astype(np.int64))
            if (exact != result.data).any():
                raise OverflowError(f"int32 {op.__name__} gives {np.abs(exact).max()}")
        return result


class StrictFunction(InterpretedFunction):
    """A kernel over CPU tensors in place; a store to one address by two programs is an error."""

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        builder: Any = interpreter.interpreter_builder
        builder.allow(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        builder.stored.clear()
        identities = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
        builder.launches.append((self.fn.__name__, grid, *identities, kwargs))
        _InPlace(self.rewrite(), self.arg_names, grid)(*args, **kwargs)
        stored = np.concatenate(builder.stored) if builder.stored else np.empty(0)
        if len(np.unique(stored)) != len(stored):
            raise RuntimeError("two stores to one address")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)


class _InPlace(GridExecutor):
    def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    def _restore_args_dev(self, *args: Any) -> None:
        return None


@contextmanager
def interpreted(*modules: ModuleType) -> Iterator[StrictBuilder]:
    """Runs the kernels of these modules in strict mode."""
    builder = StrictBuilder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "interpreter_builder", builder)
        patch.setattr(interpreter.interpreter_semantic, "builder", builder)
        # A kernel of the language's own library.
        patch.setattr(tl, "sum", StrictFunction(tl.sum.fn))
        for module in modules:
            for name, kernel in vars(module).copy().items():
                if hasattr(kernel, "fn") and hasattr(kernel, "arg_names"):
                    patch.setattr(module, name, StrictFunction(kernel.fn))
        yield builder
