"""What hooks see of each endpoint's request, and how refusals reach each kind of client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.classify.protocol import ClassificationCompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest
from vllm.entrypoints.pooling.pooling.protocol import PoolingCompletionRequest
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeCompletionRequest
from vllm.exceptions import GracefulHTTPError, VLLMNotFoundError, VLLMValidationError

from lora_plugin.errors import (
    AdapterNotFound,
    AdapterRejected,
    BadRequest,
    Code,
    LoraPluginError,
    Refused,
    Unavailable,
)
from lora_plugin.hooks import Request
from lora_plugin.hosts.vllm import incoming
from lora_plugin.hosts.vllm.incoming import BodyFields
from lora_plugin.readiness.staging import StageSpec
from lora_plugin.routing.scope import Chosen, RequestScope, current_request

MESSAGES = [{"role": "user", "content": "hello"}]
SPEC = StageSpec(1 << 40, "sql", "5f" * 32, "/adapters/sql", 4096)
BODIES: list[tuple[type[Any], dict[str, Any]]] = [
    (ChatCompletionRequest, {"messages": MESSAGES}),
    (CompletionRequest, {"prompt": "hello"}),
    (ResponsesRequest, {"input": "hello"}),
    (EmbeddingCompletionRequest, {"input": "hello"}),
    (EmbeddingChatRequest, {"messages": MESSAGES}),
    (PoolingCompletionRequest, {"input": "hello"}),
    (ClassificationCompletionRequest, {"input": "hello"}),
    (RerankRequest, {"query": "hello", "documents": ["a"]}),
    (TokenizeCompletionRequest, {"prompt": "hello"}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=[kind.__name__ for kind, _ in BODIES])
def test_every_endpoint_keeps_fields_that_it_does_not_know(kind: type[Any], body: dict[str, Any]) -> None:
    said = {"model": "base", "lora_path": "sql", "adapter_id": "law", "user": "me", **body}
    fields = BodyFields(kind.model_validate(said))
    assert {name: fields.get(name) for name in ("lora_path", "adapter_id", "user")} == {
        "lora_path": "sql",
        "adapter_id": "law",
        "user": "me",
    }
    assert "model" not in fields
    # The host's own validators may add some.
    assert set(fields) >= said.keys() - {"model"}
    assert len(fields) == len(set(fields))
    assert "lora_path" not in BodyFields(kind.model_validate({"model": "base", **body}))


class Serving:
    """As much of the host's serving classes as the plugin asks."""

    def __init__(self, choose: Callable[[Request], Chosen], any_name: bool = False) -> None:
        self.asked: list[Request] = []
        self.any_name = any_name

        async def answer(request: Request, scope: RequestScope, *, several: bool) -> Chosen:
            self.asked.append(request)
            return choose(request)

        chooser = SimpleNamespace(choose=answer)
        base = SimpleNamespace(name="base")
        service = SimpleNamespace(chooser=chooser, counting_refusals=contextlib.nullcontext)
        self.models = SimpleNamespace(lora_plugin_service=service, base_model_paths=[base])
        self.request_logger = None

    def _is_model_supported(self, name: str) -> bool:
        return self.any_name or name == "base"

    def create_error_response(self, message: str, kind: str, status: int, param: str) -> Any:
        return (int(status), kind, message)


async def unreachable(*args: Any) -> Any:
    raise AssertionError


def check(serving: Serving, wrap: Callable[..., Any], model: str = "sql") -> tuple[Any, Chosen | None]:
    async def run() -> tuple[Any, Chosen | None]:
        answer = await wrap(unreachable)(serving, CompletionRequest(model=model, prompt="hello"))
        return answer, current_request().chosen

    return asyncio.run(run())


def failing(error: LoraPluginError) -> Callable[[Request], Chosen]:
    def choose(request: Request) -> Chosen:
        raise error

    return choose


def test_what_was_chosen_is_what_the_host_gets() -> None:
    serving = Serving(lambda request: Chosen(SPEC))

    async def run() -> Any:
        body = CompletionRequest(model="prod", prompt="hello")
        assert await incoming.check_model(unreachable)(serving, body) is None
        return incoming.maybe_get_adapters(unreachable)(serving, body)

    assert asyncio.run(run()).lora_name == "sql"
    assert serving.asked[0].model == "prod"
    assert serving.asked[0].base_models == ("base",)


def test_a_request_that_was_never_checked_is_the_hosts() -> None:
    original = incoming.maybe_get_adapters(lambda serving, body: "the host's")
    assert original(Serving(lambda request: Chosen(SPEC)), None) == "the host's"


REFUSALS: list[tuple[LoraPluginError, int, type[Exception]]] = [
    (AdapterNotFound(Code.NOT_FOUND, "nobody"), 404, VLLMNotFoundError),
    (AdapterRejected(Code.NOT_FINITE, "NaN"), 400, VLLMValidationError),
    (BadRequest(Code.NAME_CONFLICT, "two"), 400, VLLMValidationError),
    (Refused("not for you", 403), 403, GracefulHTTPError),
    (Unavailable(Code.NOT_READY, "later"), 503, GracefulHTTPError),
]


@pytest.mark.parametrize(("error", "status", "raised"), REFUSALS, ids=[str(r[0].code) for r in REFUSALS])
def test_refusals(error: LoraPluginError, status: int, raised: type[Exception]) -> None:
    answer, chosen = check(Serving(failing(error)), incoming.check_model)
    assert (answer[0], chosen) == (status, None)
    assert answer[2] == str(error)
    with pytest.raises(raised, match=error.reason.message):
        check(Serving(failing(error)), incoming.check_pooling_model)


def test_the_host_may_take_any_name_for_the_base_models() -> None:
    """VLLM_SKIP_MODEL_NAME_VALIDATION; what a field or header names is never taken so."""
    error = AdapterNotFound(Code.NOT_FOUND, "nobody")
    assert check(Serving(failing(error), any_name=True), incoming.check_model, "gpt-4") == (
        None,
        Chosen(None),
    )
    for model in ("base", ""):
        answer, chosen = check(Serving(failing(error), any_name=True), incoming.check_model, model)
        assert (answer[0], chosen) == (404, None)
