"""Calls the kernel over one layer."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lora_plugin.kernels.layer import LayerWeights
from lora_plugin.kernels.native.library import DTYPES, LayerTable, load
from lora_plugin.kernels.native.step import NativeStep

_KINDS = {torch.int32: 1, torch.int64: 2}
"""The kernel's number for an embedding of such ids; 0 is a linear layer."""


class NativeLayer:
    """A layer on the CPU; one call of the library, with addresses prepared beforehand."""

    def __init__(self, weights: LayerWeights, step: NativeStep) -> None:
        self.weights, self.step = weights, step
        self._width = sum(weights.widths)
        self._embeds = weights.kind == "embedding"
        self._bs = (ctypes.c_void_p * len(weights.b))(*(b.data_ptr() for b in weights.b))
        self._widths = (ctypes.c_int64 * len(weights.b))(*weights.widths)
        self._table = LayerTable(
            step.address,
            weights.a.data_ptr(),
            ctypes.addressof(self._bs),
            ctypes.addressof(self._widths),
            len(weights.b),
            weights.in_features,
            0,
            DTYPES[weights.a.dtype],
        )
        self._address = ctypes.addressof(self._table)
        self._apply = load().lora_cpu_apply
        self._version = -1

    def __call__(self, y: Tensor, x: Tensor) -> None:
        """Adds the adapters' share to y [T, out] from x [T, in] (ids [T] for an embedding, int32 or int64).

        An id that A has no column for has no share.

        Raises:
            ValueError: y or x is of another dtype or shape than the weights or the step, or wants a gradient.
        """
        if self._version != self.step.version:
            self._check(y, x)
        stop, stride = self.step.stop, y.stride()
        if y.size(0) < stop or x.size(0) < stop or stride[1] != 1:
            raise ValueError(f"y {tuple(y.shape)}, x {tuple(x.shape)}: the step has {stop} contiguous rows")
        if self._embeds:
            self._table.kind = _KINDS[x.dtype]
        elif x.stride(1) != 1:
            x = x.contiguous()
        self._apply(self._address, y.data_ptr(), x.data_ptr(), stride[0], x.stride(0))

    def _check(self, y: Tensor, x: Tensor) -> None:
        """Once per step: calls in the same place have this in common."""
        dtype = self.weights.a.dtype
        if y.dtype != dtype or y.shape[1] != self._width:
            raise ValueError(f"y must be {dtype} [rows, {self._width}], not {y.dtype} {tuple(y.shape)}")
        if not self._embeds and (x.dtype != dtype or x.shape[1] != self.weights.in_features):
            raise ValueError(f"x must be {dtype} [rows, {self.weights.in_features}], not {x.dtype}")
        if y.requires_grad or x.requires_grad:
            raise ValueError("adapters are served, not trained: call this under torch.inference_mode")
        self._version = self.step.version
