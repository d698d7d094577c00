"""A request whose adapter is lost ends alone, with the reason, on the host's own way to the client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import GracefulHTTPError, VLLMNotFoundError
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from lora_plugin.errors import Code, Reason
from lora_plugin.hosts.vllm import lost
from lora_plugin.hosts.vllm.scheduler import LoraSchedulerMixin

GONE = Reason(Code.NOT_FOUND, "the folder is gone")
CHANGED = Reason(Code.CHANGED, "the folder changed", hint="try again")


def request(name: str, *, pooling: bool = False) -> Any:
    return SimpleNamespace(
        request_id=name,
        client_index=0,
        pooling_params=object() if pooling else None,
        trace_headers=None,
        status=None,
        num_output_tokens=0,
        num_computed_tokens=0,
        num_preemptions=0,
        get_finished_reason=lambda: FinishReason.ERROR,
        take_events=lambda: None,
        lora_request=SimpleNamespace(lora_int_id=7),
    )


class HostScheduler:
    """The host's, as far as the mixin asks it."""

    def __init__(self, *requests: Any) -> None:
        self.requests = {r.request_id: r for r in requests}

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        return True

    def finish_requests(self, request_id: str, status: RequestStatus) -> list[Any]:
        request = self.requests.pop(request_id)
        request.status = status
        return [request]

    def update_from_output(self) -> dict[int, EngineCoreOutputs]:
        return {}


class Scheduler(LoraSchedulerMixin, HostScheduler):
    def __init__(self, *requests: Any, reason: Reason | None) -> None:
        HostScheduler.__init__(self, *requests)
        self.unloaded: dict[str, str] = {}
        self.pool: Any = SimpleNamespace(
            try_admit=lambda *args, **kwargs: False, overstayed=lambda: self.unloaded
        )
        self.adapters: Any = SimpleNamespace(park=lambda adapter_id: reason)
        self._lost = {}


@pytest.mark.parametrize("pooling", [False, True])
def test_only_a_refused_request_is_finished(pooling: bool) -> None:
    bad, other = request("bad", pooling=pooling), request("other")
    scheduler = Scheduler(bad, other, reason=GONE)
    assert not scheduler._handle_blocked_waiting_request(bad)
    (output,) = scheduler.update_from_output()[0].outputs
    assert (output.request_id, output.finish_reason) == ("bad", FinishReason.ERROR)
    # Without it the host's output handler, which serves all requests, fails on a pooling request.
    assert (output.pooling_output is not None) == pooling
    assert list(scheduler.requests) == ["other"]
    assert scheduler.update_from_output() == {}


@pytest.mark.parametrize("begun", [False, True])
def test_what_overstays_its_adapter_ends_with_what_it_has(begun: bool) -> None:
    late = request("late")
    late.num_output_tokens = 3 if begun else 0
    scheduler = Scheduler(late, request("other"), reason=None)
    scheduler.unloaded = {"late": "sql", "gone meanwhile": "sql"}
    (output,) = scheduler.update_from_output()[0].outputs
    assert late.status is (RequestStatus.FINISHED_ABORTED if begun else RequestStatus.FINISHED_ERROR)
    assert str(output.stop_reason).startswith("lora_plugin:") != begun
    assert "'sql' was unloaded" in str(output.stop_reason)
    assert list(scheduler.requests) == ["other"]


def test_a_waiting_request_goes_on_waiting() -> None:
    waiting = request("waiting")
    scheduler = Scheduler(waiting, reason=None)
    assert not scheduler._handle_blocked_waiting_request(waiting)
    assert scheduler.update_from_output() == {}
    assert list(scheduler.requests) == ["waiting"]


def stream_of(*outputs: Any) -> tuple[Any, list[str]]:
    """A host method that yields these, and what became of its stream."""
    fate: list[str] = []

    async def method(self: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        try:
            for output in outputs:
                yield output
        finally:
            fate.append("closed")

    return method, fate


def generated(stop_reason: Any = None, *, finished: bool = True) -> Any:
    return SimpleNamespace(finished=finished, outputs=[SimpleNamespace(stop_reason=stop_reason)])


@pytest.mark.parametrize(("reason", "error"), [(GONE, VLLMNotFoundError), (CHANGED, GracefulHTTPError)])
async def test_the_client_is_told_the_reason(reason: Reason, error: type[Exception]) -> None:
    marked = lost.output_for(request("r"), reason).stop_reason
    method, fate = stream_of(generated(finished=False), generated(marked))
    with pytest.raises(error) as told:
        async for _ in lost.generate(method)(None, lora_request=object()):
            pass
    assert str(reason) in str(told.value)
    assert fate == ["closed"]


async def test_other_outputs_pass() -> None:
    outputs = [generated(finished=False), generated("END"), generated(2)]
    for lora_request in (None, object()):
        method, _ = stream_of(*outputs)
        assert [o async for o in lost.generate(method)(None, lora_request=lora_request)] == outputs


async def test_a_client_that_leaves_closes_the_hosts_stream() -> None:
    method, fate = stream_of(*[generated(finished=False)] * 3)
    stream = lost.generate(method)(None, lora_request=object())
    await anext(stream)
    await stream.aclose()
    assert fate == ["closed"]


async def test_nothing_pooled_is_an_error() -> None:
    def pooled(size: int) -> Any:
        return SimpleNamespace(finished=True, outputs=SimpleNamespace(data=torch.zeros(size)))

    method, _ = stream_of(pooled(4))
    assert [o async for o in lost.encode(method)(None, lora_request=object())]
    method, _ = stream_of(pooled(0))
    with pytest.raises(GracefulHTTPError):
        await anext(lost.encode(method)(None, lora_request=object()))
