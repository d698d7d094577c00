"""A request whose adapter was taken away: told why, from the scheduler to the client.

Between the choice of a version and its first step the host cache may drop it, and its files may be gone by
then; or the operator's time limit for an unloaded adapter is over. The host knows only that a request failed;
the reason travels in the output's `stop_reason`. Tokens that were made already are the client's: such a
request ends with `finish_reason` "abort" and the reason's words as `stop_reason`.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import AsyncGenerator, Callable
from http import HTTPStatus
from typing import Any

import torch
from vllm.exceptions import GracefulHTTPError, VLLMNotFoundError
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from lora_plugin.errors import Code, Reason

_MARK = "lora_plugin:"
_RETRY = Reason(Code.CHANGED, "the adapter was lost before its request could run", hint="try again")


def ending(request: Request) -> RequestStatus:
    """How a request ends whose adapter was taken away: with an error, or with what it has so far."""
    return RequestStatus.FINISHED_ABORTED if request.num_output_tokens else RequestStatus.FINISHED_ERROR


def output_for(request: Request, reason: Reason) -> EngineCoreOutput:
    """The last output of a request that was finished as `ending` says."""
    begun = request.status == RequestStatus.FINISHED_ABORTED
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        # The host's output handler takes a pooling request's output for granted.
        pooling_output=None if request.pooling_params is None else torch.empty(0),
        finish_reason=request.get_finished_reason(),
        stop_reason=str(reason) if begun else _MARK + json.dumps(reason.to_dict()),
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )


def generate(original: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    """Around `AsyncLLM.generate`: raises the reason where the host would say "Internal server error"."""
    return _watched(original, _generation_reason)


def encode(original: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    """Around `AsyncLLM.encode`, whose outputs carry no stop reason: nothing pooled means lost."""
    return _watched(original, lambda output: _RETRY if output.outputs.data.numel() == 0 else None)


def _watched(
    original: Callable[..., AsyncGenerator[Any, None]], reason_of: Callable[[Any], Reason | None]
) -> Callable[..., AsyncGenerator[Any, None]]:
    async def watch(stream: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(stream):
            async for output in stream:
                if output.finished and (reason := reason_of(output)) is not None:
                    raise _error(reason)
                yield output

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        stream = original(self, *args, **kwargs)
        return stream if kwargs.get("lora_request") is None else watch(stream)

    return method


def _generation_reason(output: Any) -> Reason | None:
    for choice in output.outputs:
        if isinstance(choice.stop_reason, str) and choice.stop_reason.startswith(_MARK):
            return Reason.from_dict(json.loads(choice.stop_reason.removeprefix(_MARK)))
    return None


def _error(reason: Reason) -> Exception:
    gone = reason.code in (Code.NOT_FOUND, Code.UNLOADED)
    error: Exception = (
        VLLMNotFoundError(str(reason))
        if gone
        else GracefulHTTPError(str(reason), HTTPStatus.SERVICE_UNAVAILABLE)
    )
    return error
