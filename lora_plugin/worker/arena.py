"""The device tensors that hold the adapters in use: one pair of A and B per wrapped layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lora_plugin.adapter.pack import PackedAdapter
from lora_plugin.errors import Code, LoraPluginError
from lora_plugin.kernels import LayerWeights
from lora_plugin.layout import Kind, Layer, ModelLayout


@dataclass(frozen=True, slots=True)
class Resident:
    """An adapter in the arena.

    Attributes:
        entry: its index in the tables that the kernels read.
        first_row: where its rows begin, in every layer.
        rank: how many rank rows it has; those of its gain and shift follow.
    """

    entry: int
    first_row: int
    rank: int


class Arena:
    """Adapters by id over fixed tensors; addresses never change after construction.

    Rows are `[first_row, first_row + rank)` in every layer, and two more for an adapter that scales and
    shifts outputs; a layer that the adapter does not target holds zeros there. What is loaded where is
    decided elsewhere and only executed here.

    Args:
        layout: the model's layers, with this rank's shards.
        rows: rows of every tensor (slabs x slab rows).
        granule: rows are handed out in multiples of this, so at most `rows // granule` adapters fit.
        device: where the tensors live.
        dtype: the serving dtype.
    """

    def __init__(
        self, layout: ModelLayout, rows: int, granule: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.layout = layout
        self.rows = rows
        self.max_adapters = rows // granule
        self.weights = tuple(_allocate(layer, rows, device, dtype) for layer in layout.layers)
        self.first_rows: npt.NDArray[np.int32] = np.zeros(self.max_adapters, np.int32)
        self.ranks: npt.NDArray[np.int32] = np.zeros(self.max_adapters, np.int32)
        self.affine: npt.NDArray[np.int32] = np.zeros(self.max_adapters, np.int32)
        self._residents: dict[int, Resident] = {}
        self._free_entries = list(range(self.max_adapters - 1, -1, -1))
        # Whether a row of a layer holds anything but zeros: what need not be cleared is not written.
        self._dirty: npt.NDArray[np.bool_] = np.zeros((len(layout.layers), rows), np.bool_)

    def load(self, adapter_id: int, packed: PackedAdapter, first_row: int) -> None:
        """Copy a packed adapter to `first_row`; nothing about its content can fail here.

        On a GPU the copy is queued only, on the current stream: `packed` is to be kept until it is done.

        Raises:
            LoraPluginError: ID_CLASH when the id is in the arena already.
        """
        if adapter_id in self._residents:
            raise LoraPluginError(Code.ID_CLASH, f"adapter {adapter_id} is in the arena already")
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        dirty = self._dirty[:, first_row : first_row + packed.rows]
        written = np.zeros_like(dirty)
        for packed_layer in packed.layers:
            weights = self.weights[packed_layer.layer]
            targets += _rows(weights, first_row, packed_layer.rank)
            sources += [packed_layer.a, *packed_layer.b]
            written[packed_layer.layer, : packed_layer.rank] = True
            if packed_layer.outputs:
                targets += _rows(weights, first_row + packed.rank, packed.rows - packed.rank)[1:]
                sources += packed_layer.outputs
                written[packed_layer.layer, packed.rank :] = True
        torch._foreach_copy_(targets, sources, non_blocking=True)
        self._clear(dirty & ~written, first_row)
        dirty[:] = written
        entry = self._free_entries.pop()
        self.first_rows[entry], self.ranks[entry] = first_row, packed.rank
        self.affine[entry] = packed.affine
        self._residents[adapter_id] = Resident(entry, first_row, packed.rank)

    def drop(self, adapter_id: int) -> None:
        """Forget where an adapter lies; its rows may be overwritten from now on."""
        resident = self._residents.pop(adapter_id, None)
        if resident is not None:
            self._free_entries.append(resident.entry)

    def reset(self) -> None:
        """Empty it: the device's memory lost its content, and may hold anything."""
        for weights in self.weights:
            weights.a.zero_()
            for b in weights.b:
                b.zero_()
        self._dirty[:] = False
        for adapter_id in list(self._residents):
            self.drop(adapter_id)

    def entries(self, adapter_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The table index of each request's adapter.

        Args:
            adapter_ids: [requests], 0 for the base model.

        Returns:
            [requests], -1 for the base model.

        Raises:
            LoraPluginError: INTERNAL when an adapter is not in the arena. Never answered with another's rows.
        """
        index = {0: -1}
        for adapter_id in set(adapter_ids.tolist()) - {0}:
            resident = self._residents.get(adapter_id)
            if resident is None:
                raise LoraPluginError(Code.INTERNAL, f"adapter {adapter_id} was scheduled but is not loaded")
            index[adapter_id] = resident.entry
        return np.array([index[adapter_id] for adapter_id in adapter_ids.tolist()], np.int32)

    def resident(self, adapter_id: int) -> Resident | None:
        """Where an adapter lies, or None."""
        return self._residents.get(adapter_id)

    @property
    def tables(self) -> tuple[npt.NDArray[np.int32], ...]:
        """[entries] first row, rank, and whether a gain and a shift follow: what a batch is made from."""
        return self.first_rows, self.ranks, self.affine

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(w.a.nbytes + sum(b.nbytes for b in w.b) for w in self.weights)

    def _clear(self, stale: npt.NDArray[np.bool_], first_row: int) -> None:
        """[layers, rows]: what others left in rows of an adapter that it does not write itself."""
        targets: list[torch.Tensor] = []
        for layer in np.flatnonzero(stale.any(axis=1)).tolist():
            # Written are the first rows, and perhaps the last: none between two that are stale.
            rows = np.flatnonzero(stale[layer]).tolist()
            targets += _rows(self.weights[layer], first_row + rows[0], rows[-1] - rows[0] + 1)
        if targets:
            torch._foreach_zero_(targets)


def _rows(weights: LayerWeights, first: int, number: int) -> list[torch.Tensor]:
    """These rows of A and of every slice's B."""
    rows = slice(first, first + number)
    return [weights.a[rows], *(b[rows] for b in weights.b)]


def _allocate(layer: Layer, rows: int, device: torch.device, dtype: torch.dtype) -> LayerWeights:
    # Written here and not only reserved: the first adapter's copy must not wait for page faults in a step.
    a = torch.empty(rows, len(layer.slices), layer.local_in, dtype=dtype, device=device).zero_()
    b = tuple(torch.empty(rows, s.local_out, dtype=dtype, device=device).zero_() for s in layer.slices)
    return LayerWeights(a, b, "embedding" if layer.kind is Kind.EMBEDDING else "linear")
