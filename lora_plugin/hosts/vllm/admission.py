"""Asks the plugins whether a waiting request may join the step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, overload

from vllm.v1.request import Request

from lora_plugin.hooks import WaitingRequest
from lora_plugin.hooks.manager import HookManager


class Admission:
    """The hook `admit` for one scheduler.

    Args:
        hooks: who is asked.
        scheduler: its `running` holds the step so far.
    """

    def __init__(self, hooks: HookManager, scheduler: Any) -> None:
        self._hooks = hooks
        self._scheduler = scheduler

    def allows(self, request: Request) -> bool:
        """Whether no plugin keeps the request waiting in this step."""
        waiting = WaitingRequest(
            request.request_id,
            _adapter(request),
            request.num_tokens - request.num_computed_tokens,
            max(0.0, time.time() - request.arrival_time),
        )
        return self._hooks.admit(_Adapters(self._scheduler.running), waiting)


class _Adapters(Sequence[str | None]):
    """The adapters of the requests in the step; a view, which costs nothing unless it is looked into."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, index: int) -> str | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[str | None]: ...

    def __getitem__(self, index: int | slice) -> str | list[str | None] | None:
        if isinstance(index, slice):
            return [_adapter(request) for request in self._requests[index]]
        return _adapter(self._requests[index])


def _adapter(request: Request) -> str | None:
    return None if request.lora_request is None else str(request.lora_request.lora_name)
