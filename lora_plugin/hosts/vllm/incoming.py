"""Where the host asks for a request's adapter: it is chosen once, and kept in the request's scope."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError, VLLMNotFoundError, VLLMValidationError

from lora_plugin.errors import AdapterNotFound, LoraPluginError
from lora_plugin.hooks import Request
from lora_plugin.hosts.vllm.requests import to_lora_request
from lora_plugin.hosts.vllm.server import service_of
from lora_plugin.hosts.vllm.vllm_0_30 import log_request_body
from lora_plugin.routing.scope import Chosen, begin_choice, current_request
from lora_plugin.service import Service

ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.FORBIDDEN: "PermissionDeniedError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}
"""What the host calls errors of these statuses."""


class BodyFields(Mapping[str, Any]):
    """The top-level fields that a client gave but `model`, those included that the host does not know.

    A view: a prompt may be long.

    Args:
        body: the host's request, a pydantic model.
    """

    def __init__(self, body: Any) -> None:
        self._body = body

    def __getitem__(self, name: str) -> Any:
        if name == "model" or name not in self._body.model_fields_set:
            raise KeyError(name)
        return getattr(self._body, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._body.model_fields_set - {"model"})

    def __len__(self) -> int:
        return len(self._body.model_fields_set - {"model"})


def check_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `BaseServing._check_model`: a version that is ready, or an error response."""

    @functools.wraps(original)
    async def method(self: Any, request: Any) -> Any:
        service = service_of(self.models)
        if service is None:
            return await original(self, request)
        log_request_body(self.request_logger, request)
        try:
            with service.counting_refusals():
                await _choose(self, service, request)
        except LoraPluginError as error:
            status = HTTPStatus(error.status)
            kind = ERROR_TYPES.get(status, "InternalServerError")
            return self.create_error_response(str(error), kind, status, param="model")
        return None

    return method


def check_pooling_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `PoolingBaseServing._check_model`, whose answer is ignored: refusals are raised."""

    @functools.wraps(original)
    async def method(self: Any, request: Any) -> Any:
        service = service_of(self.models)
        if service is None:
            return await original(self, request)
        try:
            with service.counting_refusals():
                await _choose(self, service, request)
        except AdapterNotFound as error:
            raise VLLMNotFoundError(str(error)) from None
        except LoraPluginError as error:
            if error.status == HTTPStatus.BAD_REQUEST:
                raise VLLMValidationError(str(error), parameter="model") from None
            raise GracefulHTTPError(str(error), HTTPStatus(error.status)) from None
        return None

    return method


async def _choose(serving: Any, service: Service, body: Any) -> None:
    scope = begin_choice()
    base_models = tuple(model.name for model in serving.models.base_model_paths)
    request = Request(body.model or "", BodyFields(body), scope.headers, scope.path, base_models)
    scope.chosen = None
    try:
        if isinstance(serving, _names_only()):
            service.chooser.check(request)
        else:
            scope.chosen = await service.chooser.choose(request, scope, several=_takes_several(body))
    except AdapterNotFound:
        # The host was told to take every name for the base model's (VLLM_SKIP_MODEL_NAME_VALIDATION).
        any_name = request.model and serving._is_model_supported(request.model)
        if not any_name or request.model in base_models:
            raise
        scope.chosen = Chosen(None)


def _takes_several(body: Any) -> bool:
    """Whether a response takes several engine requests: beam search, the Responses API's tool turns."""
    tool_turns = hasattr(body, "previous_response_id") and bool(body.tools)
    return tool_turns or bool(getattr(body, "use_beam_search", False))


@functools.cache
def _names_only() -> tuple[type, ...]:
    """They only need to know that the name is right; whatever runs the model needs the adapter."""
    from vllm.entrypoints.scale_out.derender.serving import ServingDerender
    from vllm.entrypoints.scale_out.render.serving import ServingRender
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

    return (ServingTokenization, ServingRender, ServingDerender)


def maybe_get_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `_maybe_get_adapters`, called after `_check_model`: what was chosen there, and nothing else."""

    @functools.wraps(original)
    def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if service_of(self.models) is None:
            return original(self, request, *args, **kwargs)
        chosen = current_request().chosen
        if chosen is None and not isinstance(self, _names_only()):
            return original(self, request, *args, **kwargs)
        if chosen is None or chosen.spec is None:
            return None
        return to_lora_request(chosen.spec, self.models.base_model_paths[0].name)

    return method


def no_default_mm_loras(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `_get_active_default_mm_loras`, which would take an adapter named like a content part."""

    @functools.wraps(original)
    def method(self: Any, request: Any) -> Any:
        if service_of(self.models) is None:
            return original(self, request)
        # --default-mm-loras is refused with the plugin, so the operator configured none.
        return None

    return method
