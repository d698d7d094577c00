"""Where the model runners meet the plugin: orders before a step, the batch of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from lora_plugin.hosts.vllm.scheduler import take_orders
from lora_plugin.hosts.vllm.worker import WorkerAdapters


def _adapters(runner: Any) -> WorkerAdapters | None:
    manager = getattr(runner, "lora_manager", None)
    return manager if isinstance(manager, WorkerAdapters) else None


def execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `execute_model` of either runner: what the scheduler ordered is done first."""

    @functools.wraps(original)
    def method(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        orders = take_orders(scheduler_output)
        adapters = _adapters(self)
        if orders and adapters is not None:
            adapters.execute(orders)
        return original(self, scheduler_output, *args, **kwargs)

    return method


def set_active_loras(original: Callable[..., None]) -> Callable[..., None]:
    """Around the V1 runner's: request-level arrays instead of a tuple entry per token."""

    @functools.wraps(original)
    def method(
        self: Any,
        input_batch: Any,
        num_scheduled_tokens: Any,
        num_sampled_tokens: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        adapters = _adapters(self)
        if adapters is None:
            original(self, input_batch, num_scheduled_tokens, num_sampled_tokens, *args, **kwargs)
            return
        if num_sampled_tokens is None:
            num_sampled_tokens = np.ones_like(num_scheduled_tokens, np.int32)
        ids = input_batch.request_lora_mapping[: input_batch.num_reqs]
        adapters.set_rows(ids, num_scheduled_tokens, num_sampled_tokens)

    return method


def reset_lora_state(original: Callable[..., None]) -> Callable[..., None]:
    """Around `LoRAModelRunnerMixin.reset_lora_state`, called after base weights are replaced."""

    @functools.wraps(original)
    def method(self: Any) -> None:
        original(self)
        adapters = _adapters(self)
        if adapters is not None:
            adapters.base_replaced()

    return method


def prompt_logprobs(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Around the V1 runner's `_get_prompt_logprobs_dict`: logits of prompt rows, request by request."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        adapters = _adapters(self)
        wanted = self.num_prompt_logprobs
        if adapters is None or not wanted:
            return original(self, *args, **kwargs)
        results: dict[str, Any] = {}
        for request_id in list(wanted):
            index = self.input_batch.req_id_to_index.get(request_id)
            adapter_id = 0 if index is None else int(self.input_batch.request_lora_mapping[index])
            # The host takes a request whose prompt is done out of the dict that it finds.
            self.num_prompt_logprobs = {request_id: wanted[request_id]}
            try:
                with adapters.prompt_logits(adapter_id):
                    results |= original(self, *args, **kwargs)
                if request_id not in self.num_prompt_logprobs:
                    del wanted[request_id]
            finally:
                self.num_prompt_logprobs = wanted
        return results

    return method


class RequestRows:
    """What the V2 runner's `make_lora_inputs` hands to `_set_active_loras` instead of one entry per token."""

    def __init__(self, ids: Any, tokens: Any) -> None:
        self.ids = ids
        self.tokens = tokens


def wide_ids(original: Callable[..., None]) -> Callable[..., None]:
    """Around the V2 runner's `LoraState.__init__`: adapter ids have 62 bits."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.lora_ids = self.lora_ids.astype(np.int64)

    return init


def make_lora_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the V2 runner's `LoraState.make_lora_inputs`."""

    @functools.wraps(original)
    def method(self: Any, req_ids: Any, idx_mapping: Any, num_scheduled_tokens: Any) -> Any:
        return RequestRows(self.lora_ids[idx_mapping], num_scheduled_tokens), (), set()

    return method


def set_mapping(original: Callable[..., None]) -> Callable[..., None]:
    """Around `_set_active_loras`, which the V2 runner and both runners' warm-up call."""

    @functools.wraps(original)
    def method(self: Any, prompt_lora_mapping: Any, *args: Any, **kwargs: Any) -> None:
        adapters = _adapters(self)
        if adapters is not None and isinstance(prompt_lora_mapping, RequestRows):
            rows = prompt_lora_mapping
            # One logits row per request, also with speculative decoding.
            adapters.set_rows(rows.ids, rows.tokens, np.ones_like(rows.tokens, np.int32))
            return
        original(self, prompt_lora_mapping, *args, **kwargs)

    return method
