"""What stands in a worker in place of the host's LoRA manager: it executes, and decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.layers import LoRAMapping, LoRAMappingType
from vllm.lora.request import LoRARequest
from vllm.utils.torch_utils import PIN_MEMORY

from lora_plugin.errors import Code, LoraPluginError
from lora_plugin.extensions.layers import layer_compute
from lora_plugin.extensions.steps import StepListeners
from lora_plugin.hosts.vllm.base_model import HostModel
from lora_plugin.hosts.vllm.config import arena_shape, process_hooks, required_settings
from lora_plugin.hosts.vllm.model import ModelWrapper, unwrapped_summary
from lora_plugin.kernels import Batch, register
from lora_plugin.layout import Kind, ModelLayout
from lora_plugin.pool.orders import Drop, Forget, Load, Orders
from lora_plugin.pool.pool import GRANULE
from lora_plugin.worker.arena import Arena
from lora_plugin.worker.host_memory import HostMemory, page_locked
from lora_plugin.worker.load_times import LoadTimes
from lora_plugin.worker.packing import PackingProcess
from lora_plugin.worker.recent import RecentBatches
from lora_plugin.worker.stager import Job, Stager

logger = logging.getLogger("lora_plugin")

# What staging may take of the steps' thread each time that the engine asks (every 5 to 50 ms).
_TURN_BESIDE_STEPS = 0.002
_TURN_ALONE = 0.03
_BUSY_SECONDS = 0.2

_BY_REQUEST = (Kind.LM_HEAD, Kind.CLASSIFIER)

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]


class WorkerAdapters:
    """The arena, the host cache and the batch of one worker, behind the interface of the host's manager.

    Args:
        vllm_config: the host's configuration; its `lora_config` must be set.
        device: where the model runs.
        embedding_modules: the model's embedding module names (unused: the layers say what they are).
    """

    layout: ModelLayout
    arena: Arena
    stager: Stager

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, embedding_modules: dict[str, str]
    ) -> None:
        assert vllm_config.lora_config is not None
        self._lora_config = vllm_config.lora_config
        self._device = device
        self._names: dict[int, str] = {}
        self._listeners: StepListeners | None = None
        self._prompt_adapter: int | None = None
        self._times = LoadTimes(device)
        self._recent = RecentBatches()
        self._stepped_at = 0.0
        self._outdated: set[int] = set()
        self._sampled: tuple[Ids, Counts] = (np.zeros(0, np.int64), np.zeros(0, np.int32))

    def create_lora_manager(self, model: nn.Module, vllm_config: VllmConfig) -> nn.Module:
        """Wrap the model's layers and allocate everything at full size, before memory is profiled."""
        dtype: torch.dtype = self._lora_config.lora_dtype
        slabs, slab_rows = arena_shape(self._lora_config)
        wrapper = ModelWrapper(
            model,
            self._lora_config.target_modules,
            str(dtype).removeprefix("torch."),
            slab_rows,
            classifies=_classifies(model, vllm_config),
        )
        self.layout = wrapper.wrap()
        self.arena = Arena(self.layout, slabs * slab_rows, GRANULE, self._device, dtype)
        scheduler = vllm_config.scheduler_config
        hooks = process_hooks()
        self._tokens = self._make_batch(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, dtype)
        self._logits = self._make_batch(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, dtype)
        for wrapped, weights in zip(wrapper.wrapped, self.arena.weights, strict=True):
            batch = self._logits if wrapped.layer.kind in _BY_REQUEST else self._tokens
            wrapped.module.handle = register(weights, batch, partial(layer_compute, hooks, wrapped.layer))
            classifies = wrapped.layer.kind is Kind.CLASSIFIER
            wrapped.module.before_logits = self._check_pooled if classifies else self._fit_logits
        self._base = HostModel(wrapper.model, wrapper.wrapped, vllm_config.model_config.dtype, self._device)
        self.stager = Stager(
            self.layout,
            required_settings().max_adapter_bytes,
            self._base,
            host=self._host_memory(vllm_config),
            loader=PackingProcess(self.layout).load,
            times=self._times,
        )
        if hooks.has("batch_built"):
            self._listeners = StepListeners(
                hooks, lambda adapter_id: self._names.get(adapter_id, str(adapter_id))
            )
        cast(Any, model).lora_manager = None
        logger.info(
            "wrapped %d layers; %s kernels; arena of %d slabs x %d rows, %.1f MB%s",
            len(self.layout.layers),
            self._tokens.kernels,
            slabs,
            slab_rows,
            self.arena.nbytes / 1e6,
            f" ({unwrapped_summary(self.layout.unwrapped)})" if self.layout.unwrapped else "",
        )
        return model

    def _host_memory(self, vllm_config: VllmConfig) -> HostMemory | None:
        """On a GPU: for this worker's share of its engine's budget, page-locked where the host can do so."""
        if self._device.type != "cuda":
            return None
        workers = vllm_config.parallel_config.world_size
        share = -(-required_settings().host_memory // workers) if PIN_MEMORY else 0
        return HostMemory(page_locked(share), self.layout, device=self._device.index)

    def _make_batch(self, rows: int, requests: int, dtype: torch.dtype) -> Batch:
        arena = self.arena
        return Batch(
            rows,
            requests,
            arena.max_adapters,
            arena.rows,
            self._device,
            dtype,
            kernels=required_settings().kernels,
            max_rank=arena_shape(self._lora_config)[1],
        )

    # What the scheduler decided

    def execute(self, orders: Orders) -> None:
        """Carry out the scheduler's orders, in order, before the step they came with."""
        for order in orders:
            logger.debug("order: %s", order)
            match order:
                case Load(adapter_id, first_row):
                    with self._times.copy(), self.stager.copying(adapter_id) as packed:
                        self.arena.load(adapter_id, packed, first_row)
                case Drop(adapter_id):
                    self.arena.drop(adapter_id)
                case Forget(adapter_id):
                    self.arena.drop(adapter_id)
                    self.stager.forget(adapter_id)
                    self._names.pop(adapter_id, None)

    def base_replaced(self) -> None:
        """The base model's weights are others now; the engine asks soon which adapters were made of them."""
        self._base.reset()
        self._outdated |= self.stager.relative()

    def recover(self, emptied: bool) -> list[int]:
        """What the engine asks after anything that may have changed weights or memory.

        Args:
            emptied: the device's memory lost its content: the arena is empty from now on.

        Returns:
            The adapters whose host copies were made of weights that have been replaced since.
        """
        if emptied:
            self.arena.reset()
            self._tokens.restore()
            self._logits.restore()
        outdated, self._outdated = sorted(self._outdated), set()
        return outdated

    def stage(self, jobs: list[Job], ask: list[int]) -> dict[int, dict[str, Any]]:
        """Start to stage `jobs`, and say how the adapters in `ask` stand."""
        for job in jobs:
            self._names[job.adapter_id] = job.name
            self.stager.stage(job)
        busy = time.monotonic() - self._stepped_at < _BUSY_SECONDS
        self._base.advance(_TURN_BESIDE_STEPS if busy else _TURN_ALONE)
        outcomes = {adapter_id: self.stager.outcome(adapter_id) for adapter_id in ask}
        return {adapter_id: o.to_dict() for adapter_id, o in outcomes.items() if o is not None}

    def measure(self) -> dict[str, Any]:
        """What metrics show of a worker: load times by stage, plans made by kernels."""
        return {"seconds": self._times.to_dict(), "plans": {self._tokens.kernels: self._tokens.plans}}

    def explain(self, adapter_id: int) -> dict[str, Any]:
        """What this rank knows of an adapter; see `explanation.py`."""
        outcome, resident = self.stager.outcome(adapter_id), self.arena.resident(adapter_id)
        packed = None if outcome is None else outcome.packed
        return {
            "layers": None if packed is None else [[p.layer, p.rank, p.adds] for p in packed.layers],
            "extent": None if resident is None else [resident.first_row, resident.rank],
            "steps": self._recent.to_list(),
        }

    # The batch of a step

    def set_rows(self, ids: Ids, tokens: Counts, samples: Counts) -> None:
        """Tell the kernels, and plugins, which rows of the next step use which adapter.

        Args:
            ids: [requests] adapter ids in row order, 0 for the base model.
            tokens: [requests] rows of each request in this step.
            samples: [requests] rows of each request that logits are made for.
        """
        self._set_rows(ids, tokens, samples)
        self._recent.note(self._sampled[0], tokens.copy())
        if self._listeners is not None:
            self._listeners.tell(ids, tokens)

    def _set_rows(self, ids: Ids, tokens: Counts, samples: Counts) -> None:
        entries = self.arena.entries(ids)
        self._tokens.update(entries, tokens, *self.arena.tables)
        self._logits.update(entries, samples, *self.arena.tables)
        self._sampled = (ids.copy(), samples.copy())
        self._stepped_at = time.monotonic()

    @contextmanager
    def prompt_logits(self, adapter_id: int) -> Iterator[None]:
        """Logits made inside are of prompt rows of one request, however many (prompt log-probabilities)."""
        before = self._sampled
        self._prompt_adapter = adapter_id
        try:
            yield
        finally:
            self._prompt_adapter = None
            self._update_logits(*before)

    def _fit_logits(self, rows: int) -> None:
        if self._prompt_adapter is not None:
            self._update_logits(np.array([self._prompt_adapter], np.int64), np.array([rows], np.int32))

    def _check_pooled(self, rows: int) -> None:
        ids, samples = self._sampled
        if rows != samples.sum() and ids.any():
            raise LoraPluginError(Code.INTERNAL, f"{rows} rows are classified of {samples.sum()} requests")

    def _update_logits(self, ids: Ids, samples: Counts) -> None:
        entries = self.arena.entries(ids)
        self._logits.update(entries, samples, *self.arena.tables)

    def set_active_adapters(self, requests: set[Any], mapping: LoRAMapping | None) -> None:
        """The host's way to set a batch, of warm-up and idle data-parallel steps: no row has an adapter."""
        if mapping is not None and mapping.type is LoRAMappingType.LANGUAGE:
            none = np.zeros(1, np.int64)
            self._set_rows(
                none,
                np.array([len(mapping.index_mapping)], np.int32),
                np.array([len(mapping.prompt_mapping)], np.int32),
            )

    # The rest of the host's interface

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        yield

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:
        return True

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        return default_rank

    def remove_all_adapters(self) -> None:
        """Called after warm-up and by idle data-parallel steps: real adapters stay."""

    def supports_tower_connector_lora(self) -> bool:
        return False

    def list_adapters(self) -> set[int]:
        return set()

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        raise self._decided_elsewhere()

    def remove_adapter(self, adapter_id: int) -> bool:
        raise self._decided_elsewhere()

    def pin_adapter(self, adapter_id: int) -> bool:
        raise self._decided_elsewhere()

    @staticmethod
    def _decided_elsewhere() -> LoraPluginError:
        return LoraPluginError(Code.INTERNAL, "adapters are loaded by the scheduler's orders only")


def _classifies(model: nn.Module, vllm_config: VllmConfig) -> bool:
    pooler: Any = getattr(model, "pooler", None)
    if pooler is None or vllm_config.model_config.runner_type != "pooling":
        return False
    task: str | None = vllm_config.model_config.get_pooling_task(tuple(pooler.get_supported_tasks()))
    return task == "classify"
