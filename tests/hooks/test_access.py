"""Refusals of `authorize` as errors of the family."""

from __future__ import annotations

import pickle

import pytest
from hook_samples import plugin

from lora_plugin.errors import AdapterNotFound, Code, Refused
from lora_plugin.extensions.access import check_access
from lora_plugin.hooks import Refusal, Request
from lora_plugin.hooks.manager import HookManager


def refusing(refusal: Refusal | None) -> HookManager:
    def authorize(adapter: str) -> Refusal | None:
        return refusal

    return HookManager([plugin("door", authorize)])


def test_none_lets_the_request_pass() -> None:
    check_access(refusing(None), Request("poet"), "poet")
    check_access(HookManager(), Request("poet"), "poet")


@pytest.mark.parametrize("status", [401, 403, 429, 503])
def test_a_refusal_keeps_its_words_and_status(status: int) -> None:
    with pytest.raises(Refused, match="not for you") as raised:
        check_access(refusing(Refusal("not for you", status)), Request("poet"), "poet")
    copied = pickle.loads(pickle.dumps(raised.value))
    for error in (raised.value, copied):
        assert (error.status, error.code) == (status, Code.FORBIDDEN)


def test_a_404_looks_like_an_unknown_name() -> None:
    with pytest.raises(AdapterNotFound) as raised:
        check_access(refusing(Refusal("there is one, but not for you", 404)), Request("poet"), "poet")
    assert "not for you" not in str(raised.value)
