"""Around the host's `EngineCore`: the plugin's one utility method, and what the host asks about adapters."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from vllm.lora.request import LoRARequest

from lora_plugin.errors import Code, Reason
from lora_plugin.hosts.vllm.engine import EngineAdapters


def _adapters(core: Any) -> EngineAdapters | None:
    """The core's, of the plugin's scheduler; None where the plugin is off."""
    return getattr(core.scheduler, "adapters", None)


def _call(core: Any, command: str, payload: dict[str, Any]) -> dict[str, Any]:
    adapters = _adapters(core)
    if adapters is None:
        reason = Reason(Code.INTERNAL, "the LoRA plugin is off in this engine")
        return {"error": reason.to_dict(), "status": 500}
    return adapters.call(command, payload, idle=not core.scheduler.has_requests())


def call(self: Any, command: str, payload: str) -> str:
    """Added to `EngineCore` as `lora_plugin_call`: the one utility method of the plugin.

    JSON both ways: a reply that the host cannot encode would end its output thread.
    """
    return json.dumps(_call(self, command, json.loads(payload)))


def add_lora(original: Callable[..., bool]) -> Callable[..., bool]:
    """Around `EngineCore.add_lora`: staging is started; the first request waits for it."""

    def method(self: Any, lora_request: LoRARequest) -> bool:
        adapters = _adapters(self)
        if adapters is None:
            return original(self, lora_request)
        adapters.want(lora_request)
        return adapters.refused(lora_request.lora_int_id) is None

    return method


def by_pool(original: Callable[..., Any], command: str) -> Callable[..., Any]:
    """Around `EngineCore.remove_lora` and `pin_lora`: the pool decides."""

    def method(self: Any, lora_id: int) -> Any:
        if _adapters(self) is None:
            return original(self, lora_id)
        reply = _call(self, command, {"id": lora_id})
        if "error" in reply:
            raise ValueError(str(Reason.from_dict(reply["error"])))
        return True

    return method


def list_loras(original: Callable[..., set[int]]) -> Callable[..., set[int]]:
    """Around `EngineCore.list_loras`: what is staged."""

    def method(self: Any) -> set[int]:
        if _adapters(self) is None:
            return original(self)
        return {entry.adapter_id for entry in self.scheduler.pool.ready()}

    return method


def sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `EngineCore.sleep`: what is lost is remembered."""

    @functools.wraps(original)
    def method(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        adapters = _adapters(self)
        if adapters is not None:
            adapters.slept(level)
        return original(self, level, *args, **kwargs)

    return method


def then_recover(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `EngineCore.wake_up` and `collective_rpc`, after which weights and memory may be others."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _adapters(self) is not None:
            self.scheduler.recover()
        return result

    return method
