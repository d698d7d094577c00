"""Ours, vLLM's and SGLang's kernels behind one call: each lays the same adapters out as its server would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from gpu_cases import Case, Weights
from torch import Tensor

from lora_plugin import kernels
from lora_plugin.kernels.runs import sort_by_adapter
from lora_plugin.kernels.triton.layer import DeviceLayer
from lora_plugin.kernels.triton.tiles import DeviceTiles

Apply = Callable[[Tensor, Tensor], object]
"""Adds the adapters' share to y from x."""


class Contestant(Protocol):
    """Takes a step's metadata once, then layers."""

    def __init__(self, case: Case, device: torch.device) -> None: ...

    def layer(self, weights: Weights) -> Apply: ...


class Ours:
    """The op, as the wrapped layers call it; in the interpreter, what is behind it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        ranks = np.array(case.ranks, dtype=np.int32)
        spans = (ranks + 7) // 8 * 8
        self.first_rows, self.arena_rows = (np.cumsum(spans) - spans).astype(np.int32), int(spans.sum())
        step = (np.array(case.row_adapters), np.ones(case.rows, dtype=np.int64), self.first_rows, ranks)
        self.batch = self.tiles = None
        if device.type == "cpu":
            self.tiles = DeviceTiles(case.rows, case.adapters, max(case.ranks), device)
            self.tiles.update(sort_by_adapter(*step))
        else:
            size = (case.rows, case.rows, case.adapters, self.arena_rows)
            self.batch = kernels.Batch(
                *size, device, torch.bfloat16, kernels="triton", max_rank=max(case.ranks)
            )
            self.batch.update(*step)

    def layer(self, weights: Weights) -> Apply:
        like = weights.a[0]
        a = like.new_zeros(self.arena_rows, *like.shape[1:])
        bs = tuple(like.new_zeros(self.arena_rows, width) for width in weights.linear.widths)
        for first, own_a, own_bs in zip(self.first_rows.tolist(), weights.a, weights.b, strict=True):
            rows = slice(first, first + len(own_a))
            a[rows] = own_a
            for b, own in zip(bs, own_bs, strict=True):
                b[rows] = own
        arena = kernels.LayerWeights(a, bs)
        if self.batch is None:
            assert self.tiles is not None
            return DeviceLayer(arena, self.tiles, "sm_90")
        handle, apply = kernels.register(arena, self.batch), torch.ops.lora_plugin.lora_apply.default
        return lambda y, x: apply(y, x, handle)


def _padded(parts: Sequence[Tensor], rank: int) -> Tensor:
    """[adapters, rank, ...], zeros beyond each adapter's own rank."""
    stacked = parts[0].new_zeros(len(parts), rank, *parts[0].shape[1:])
    for slot, part in zip(stacked, parts, strict=True):
        slot[: len(part)] = part
    return stacked


class Vllm:
    """vLLM's shrink and expand, with as many slots as the step has adapters."""

    def __init__(self, case: Case, device: torch.device) -> None:
        from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op, utils
        from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

        # Keyed by address, which another case's weights may have had.
        utils._LORA_A_PTR_DICT.clear()
        utils._LORA_B_PTR_DICT.clear()
        self.rank, self.shrink, self.expand = (
            max(case.ranks),
            lora_shrink_op.lora_shrink,
            lora_expand_op.lora_expand,
        )
        meta = LoRAKernelMeta.make(case.adapters, case.rows, device)
        meta.prepare_tensors(torch.tensor(case.row_adapters, dtype=torch.int32, device=device))
        self.meta = meta.meta_args(case.rows, False)

    def layer(self, weights: Weights) -> Apply:
        a = [
            _padded([a[:, i] for a in weights.a], self.rank).unsqueeze(1)
            for i in range(len(weights.linear.widths))
        ]
        b = [
            _padded(parts, self.rank).transpose(1, 2).contiguous().unsqueeze(1)
            for parts in zip(*weights.b, strict=True)
        ]

        def apply(y: Tensor, x: Tensor) -> None:
            buffer = torch.empty((len(a), len(x), self.rank), dtype=torch.float32, device=x.device)
            self.shrink(x, a, buffer, *self.meta, 1.0)
            self.expand(buffer, b, y, *self.meta, offset_start=0, add_inputs=True)

        return apply


class _Sglang:
    """What both backends of SGLang share: the layout of their pool."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.rank, self.device = case, max(case.ranks), device
        self.ranks = torch.tensor(case.ranks, dtype=torch.int32, device=device)
        self.scalings = torch.ones(case.adapters, device=device)

    def pool(self, weights: Weights) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """A [slots, slices * rank, in], slices one after another at their live rank; B [slots, out, rank]."""
        slices = len(weights.linear.widths)
        a = _padded([a.transpose(0, 1).flatten(0, 1) for a in weights.a], slices * self.rank)
        b = _padded([torch.cat(bs, 1) for bs in weights.b], self.rank).transpose(1, 2).contiguous()
        offsets = np.cumsum((0, *weights.linear.widths)).tolist()
        return a, b, tuple(offsets)


class SglangChunked(_Sglang):
    """The default backend, csgmv, with chunks of 16 rows as by default."""

    CHUNK = 16

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        order = np.argsort(case.row_adapters, kind="stable")
        counts = np.bincount(case.row_adapters, minlength=case.adapters)
        chunks = [
            (adapter, min(self.CHUNK, count - start))
            for adapter, count in enumerate(counts.tolist())
            for start in range(0, count, self.CHUNK)
        ]

        def on_device(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.info = SimpleNamespace(
            use_cuda_graph=False,
            num_segments=len(chunks),
            max_len=self.CHUNK,
            seg_indptr=on_device(np.cumsum([0, *(rows for _, rows in chunks)])),
            weight_indices=on_device([adapter for adapter, _ in chunks]),
            permutation=on_device(order),
            lora_ranks=self.ranks,
            scalings=self.scalings,
        )

    def layer(self, weights: Weights) -> Apply:
        from sglang.kernels.ops.lora.dense import chunked_sgmv_expand, chunked_sgmv_shrink

        a, b, offsets = self.pool(weights)
        on_host = torch.tensor(offsets, dtype=torch.int32)
        on_device, widest = on_host.to(self.device), max(weights.linear.widths)
        shrink = chunked_sgmv_shrink.chunked_sgmv_lora_shrink_forward
        expand = chunked_sgmv_expand.chunked_sgmv_lora_expand_forward
        slices = len(weights.linear.widths)

        def apply(y: Tensor, x: Tensor) -> None:
            shrunk = shrink(x, a, self.info, slices)
            expand(shrunk, b, self.info, on_device, widest, y, slice_offsets_cpu=on_host)

        return apply


class SglangPlanned(_Sglang):
    """The backend triton_v2: plans per architecture, here those for decode; routes are made once per step."""

    def __init__(self, case: Case, device: torch.device) -> None:
        from sglang.srt.lora.dense.runner import DenseLoraRunner
        from sglang.srt.lora.utils import Phase
        from sglang.srt.lora.workspace import LoraWorkspace

        super().__init__(case, device)
        self.runner = DenseLoraRunner(LoraWorkspace(), max_loras=case.adapters, device=device)
        self.runner.begin_batch(
            token_slots=torch.tensor(case.row_adapters, dtype=torch.int32, device=device),
            lora_ranks=self.ranks,
            scalings=self.scalings,
            num_tokens=case.rows,
            phase=Phase.DECODE,
            graph_mode=False,
        )

    def layer(self, weights: Weights) -> Apply:
        from sglang.srt.lora.dense.plan import DenseLoraKind

        a, b, offsets = self.pool(weights)
        plan = self.runner.plan_for(
            DenseLoraKind.LINEAR, self.rank, weights.linear.inputs, offsets[-1], num_tokens=self.case.rows
        )

        def apply(y: Tensor, x: Tensor) -> None:
            bridge = self.runner.run_a(x, a, stack=len(offsets) - 1, plan=plan)
            self.runner.run_b(bridge, b, y, offsets=offsets, plan=plan)

        return apply


CONTESTANTS: dict[str, type[Contestant]] = {
    "ours": Ours,
    "vllm": Vllm,
    "sglang csgmv": SglangChunked,
    "sglang triton_v2": SglangPlanned,
}
