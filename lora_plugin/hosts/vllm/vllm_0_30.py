"""What vLLM 0.30 has otherwise than later versions; the module goes when 0.30 is no longer served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

# A name that only 0.30 has: a later version's missing name is to be reported as that one's.
IS_HOST = hasattr(Scheduler, "_try_promote_blocked_waiting_request")


class WaitingRequests:
    """Between the mixin and 0.30's scheduler: the method that later ones ask for every waiting request.

    0.30 asks only for those that wait for something of its own, so here all of them look like that.
    """

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        waits = super()._is_blocked_waiting_status(request.status)  # type: ignore[misc]
        return not waits or bool(super()._try_promote_blocked_waiting_request(request))  # type: ignore[misc]

    @staticmethod
    def _is_blocked_waiting_status(status: RequestStatus) -> bool:
        return True

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:
        return self._handle_blocked_waiting_request(request)

    def _enqueue_waiting_request(self, request: Request) -> None:
        # As 0.30 does; its own would take every new request for one that was skipped.
        waits = super()._is_blocked_waiting_status(request.status)  # type: ignore[misc]
        (self.skipped_waiting if waits else self.waiting).add_request(request)  # type: ignore[attr-defined]


def scheduler_bases() -> tuple[type[Any], ...]:
    """What goes between the mixin and the host's scheduler."""
    return (WaitingRequests,) if IS_HOST else ()


def lora_hash_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `_gen_lora_extra_hash_keys`: the path is in the key, as it is in later versions."""

    def keys(request: Request) -> list[tuple[str, str, str]]:
        lora_request = request.lora_request
        return [] if lora_request is None else [("lora", lora_request.lora_name, lora_request.lora_path)]

    return keys


def log_request_body(request_logger: Any, body: Any) -> None:
    """`RequestLogger.log_request_body`, which 0.30 has not."""
    if request_logger is not None and not IS_HOST:
        request_logger.log_request_body(body)
