"""`batch_built` and `admit`: what they are given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from hook_samples import plugin
from hypothesis import given
from hypothesis import strategies as st

from lora_plugin.extensions.steps import StepListeners
from lora_plugin.hooks import Batch, WaitingRequest
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hosts.vllm.admission import Admission


@given(st.lists(st.tuples(st.sampled_from([0, 7, 1 << 61, 9]), st.integers(0, 99)), max_size=20))
def test_a_batch_names_every_requests_adapter(requests: list[tuple[int, int]]) -> None:
    built: list[Batch] = []

    def batch_built(batch: Batch) -> None:
        built.append(batch)

    listeners = StepListeners(HookManager([plugin("ear", batch_built)]), str)
    ids = np.array([adapter_id for adapter_id, _ in requests], np.int64)
    listeners.tell(ids, np.array([tokens for _, tokens in requests], np.int32))
    (batch,) = built
    named = [batch.adapters[place] if place >= 0 else None for place in batch.index]
    assert named == [str(adapter_id) if adapter_id else None for adapter_id, _ in requests]
    assert list(batch.tokens) == [tokens for _, tokens in requests]
    assert sorted(set(batch.index) - {-1}) == list(range(len(batch.adapters)))
    assert list(batch.adapters) == list(dict.fromkeys(name for name in named if name))


def request(request_id: str, adapter: str | None, tokens: int = 5) -> Any:
    lora = None if adapter is None else SimpleNamespace(lora_name=adapter)
    return SimpleNamespace(
        request_id=request_id,
        lora_request=lora,
        num_tokens=tokens,
        num_computed_tokens=2,
        arrival_time=time.time() - 3,
    )


def test_admission_sees_the_step_and_the_request() -> None:
    asked: list[tuple[list[str | None], WaitingRequest]] = []

    def admit(batch_so_far: Sequence[str | None], request: WaitingRequest) -> bool | None:
        asked.append((list(batch_so_far), request))
        return False if batch_so_far[-1:] == ["poet"] else None

    scheduler = SimpleNamespace(running=[request("1", None)])
    admission = Admission(HookManager([plugin("guard", admit)]), scheduler)
    assert admission.allows(request("2", "poet"))
    scheduler.running.append(request("2", "poet"))
    assert not admission.allows(request("3", None))
    assert [step for step, _ in asked] == [[None], [None, "poet"]]
    first = asked[0][1]
    assert (first.id, first.adapter, first.tokens) == ("2", "poet", 3)
    assert 3 <= first.waited < 60
