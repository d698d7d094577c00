"""A mixin over whichever scheduler the host uses: it owns the pool and admits requests by it."""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request

from lora_plugin.errors import Code, Reason
from lora_plugin.hosts.vllm.admission import Admission
from lora_plugin.hosts.vllm.config import active, arena_shape, process_hooks, required_settings
from lora_plugin.hosts.vllm.engine import EngineAdapters, executor_of
from lora_plugin.hosts.vllm.lost import ending, output_for
from lora_plugin.hosts.vllm.vllm_0_30 import scheduler_bases
from lora_plugin.pool.orders import Orders
from lora_plugin.pool.pool import AdapterPool

ORDERS = "lora_plugin_orders"


class LoraSchedulerMixin:
    """Requests whose adapter is not staged, or does not fit this step, wait; the others pass them."""

    host_class: ClassVar[type[Any]]
    _admission: Admission | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not active(self.vllm_config):  # type: ignore[attr-defined]
            # Chosen before the configuration is known; without LoRA nothing of the plugin stays.
            self.__class__ = self.host_class
            return
        lora_config = self.vllm_config.lora_config  # type: ignore[attr-defined]
        slabs, slab_rows = arena_shape(lora_config)
        settings, hooks = required_settings(), process_hooks()
        self.pool = AdapterPool(
            slabs,
            slab_rows,
            int(settings.host_memory),
            eviction=settings.eviction,
            max_wait_seconds=settings.max_wait_seconds,
        )
        self.adapters = EngineAdapters(
            executor_of(self.vllm_config),  # type: ignore[attr-defined]
            self.pool,
            hooks,
            lambda: self.requests.values(),  # type: ignore[attr-defined]
        )
        if hooks.has("admit"):
            self._admission = Admission(hooks, self)
        self._lost: dict[str, Reason] = {}
        # The pool is the limit: the host's own count of distinct adapters must never be the lower one.
        self.lora_config = copy.copy(lora_config)
        self.lora_config.max_loras = 1 << 30

    def add_request(self, request: Request) -> None:
        super().add_request(request)  # type: ignore[misc]
        if request.lora_request is not None:
            self.adapters.want(request.lora_request)
            self.pool.acquire(request.request_id, request.lora_request.lora_int_id)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self.pool.release(request.request_id)
        if request.lora_request is not None:
            self.adapters.usage.finished(
                request.lora_request.lora_name, request.num_prompt_tokens, request.num_output_tokens
            )
        return result

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.adapters.advance()
        running: list[Request] = self.running  # type: ignore[attr-defined]
        self.pool.begin_step(
            {r.request_id: r.lora_request.lora_int_id for r in running if r.lora_request is not None}
        )
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if output.total_num_scheduled_tokens:
            self.adapters.usage.step(self.pool.num_in_use)
        orders = self.adapters.take_orders()
        if orders:
            setattr(output, ORDERS, orders)
        return output

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # The host's own skip: it asks this for every waiting request before it takes it into the step.
        if not super()._handle_blocked_waiting_request(request):  # type: ignore[misc]
            return False
        if self._admission is not None and not self._admission.allows(request):
            self.pool.stand_back(request.request_id)
            return False
        lora_request: LoRARequest | None = request.lora_request
        if lora_request is None:
            return True
        started = request.num_preemptions > 0 or request.num_computed_tokens > 0
        if self.pool.try_admit(lora_request.lora_int_id, request.request_id, started=started):
            return True
        reason = self.adapters.park(lora_request.lora_int_id)
        if reason is not None:
            self._lost[request.request_id] = reason
        return False

    def recover(self) -> None:
        """Weights or memory of the workers may be others now: what was made of them is made anew."""
        outdated = self.adapters.recover()
        running: list[Request] = self.running  # type: ignore[attr-defined]
        if any(r.lora_request is not None and r.lora_request.lora_int_id in outdated for r in running):
            # They begin again, as the host has it for requests that it keeps over a sleep.
            self.reset_prefix_cache(reset_running_requests=True)  # type: ignore[attr-defined]
        self.adapters.renew(outdated)

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        lost = self._finish_lost()
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        for client_index, output in lost:
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _finish_lost(self) -> list[tuple[int, EngineCoreOutput]]:
        reasons, self._lost = self._lost, {}
        for request_id, name in self.pool.overstayed().items():
            message = f"the adapter {name!r} was unloaded, and its time to finish is over"
            reasons[request_id] = Reason(Code.UNLOADED, message)
        outputs = []
        for request_id, reason in reasons.items():
            request: Request | None = self.requests.get(request_id)  # type: ignore[attr-defined]
            if request is not None and self.finish_requests(request_id, ending(request)):  # type: ignore[attr-defined]
                outputs.append((request.client_index, output_for(request, reason)))
        return outputs


def take_orders(output: SchedulerOutput) -> Orders:
    """The orders that came with a step."""
    return getattr(output, ORDERS, ())


@functools.cache
def mixed(scheduler_class: type[Any]) -> type[Any]:
    """The scheduler class with the mixin over it; the same class for the same base."""
    return type(
        f"Lora{scheduler_class.__name__}",
        (LoraSchedulerMixin, *scheduler_bases(), scheduler_class),
        {"host_class": scheduler_class},
    )


def choose_scheduler(original: Any) -> Any:
    """Around `SchedulerConfig.get_scheduler_cls`."""

    def get_scheduler_cls(self: Any) -> type[Any]:
        return mixed(original(self))

    return get_scheduler_cls
