"""The host's two endpoints for adapters, as controllers call them: same bodies, same codes, one truth."""

from __future__ import annotations

import functools
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from vllm import envs
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from lora_plugin.errors import LoraPluginError
from lora_plugin.hooks import Request as PluginRequest
from lora_plugin.hosts.vllm.incoming import ERROR_TYPES, BodyFields
from lora_plugin.hosts.vllm.server import service_of
from lora_plugin.routing.scope import current_request
from lora_plugin.settings import load_settings

# These two endpoints of the host call it so.
_TYPES: Final = {**ERROR_TYPES, HTTPStatus.BAD_REQUEST: "InvalidUserInput"}


def attach_router(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Around the host's `attach_router`, which leaves them out without VLLM_ALLOW_RUNTIME_LORA_UPDATING.

    The host refuses that variable with several API servers, because it would load in one of them only.
    """

    @functools.wraps(original)
    def function(app: Any) -> None:
        original(app)
        settings = load_settings()
        if settings and settings.load_endpoints and not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            app.include_router(_router())

    return function


def load_lora_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `OpenAIServingModels.load_lora_adapter`: 200 once it is served; the same again is 200."""

    @functools.wraps(original)
    async def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        service = service_of(self)
        if service is None:
            return await original(self, request, *args, **kwargs)
        if not request.lora_name or not request.lora_path:
            return _error("Both 'lora_name' and 'lora_path' must be provided.", HTTPStatus.BAD_REQUEST)
        scope = current_request()
        base_models = tuple(model.name for model in self.base_model_paths)
        asked = PluginRequest("", BodyFields(request), scope.headers, scope.path, base_models)
        try:
            await service.check_new_name(request.lora_name, request.lora_path, asked)
            await service.operations.load_from(
                request.lora_name, request.lora_path, again=request.load_inplace
            )
        except LoraPluginError as error:
            return _error(str(error), HTTPStatus(error.status))
        return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    return method


def unload_lora_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `OpenAIServingModels.unload_lora_adapter`: out of memory too; a load brings it back."""

    @functools.wraps(original)
    async def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        service = service_of(self)
        if service is None:
            return await original(self, request, *args, **kwargs)
        name = request.lora_name
        if not name:
            return _error(
                "'lora_name' needs to be provided to unload a LoRA adapter.", HTTPStatus.BAD_REQUEST
            )
        await service.operations.look(name)
        if not service.serves(name):
            return _error(f"The lora adapter '{name}' cannot be found.", HTTPStatus.NOT_FOUND)
        try:
            await service.operations.unload(name)
        except LoraPluginError as error:
            return _error(str(error), HTTPStatus(error.status))
        return f"Success: LoRA adapter '{name}' removed successfully."

    return method


def _router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(validate_json_request)])

    # Annotations that FastAPI can resolve: this module's own names.
    @router.post("/v1/load_lora_adapter")
    async def load(request: LoadLoRAAdapterRequest, raw_request: Request) -> Response:
        return _response(await _models(raw_request).load_lora_adapter(request))

    @router.post("/v1/unload_lora_adapter")
    async def unload(request: UnloadLoRAAdapterRequest, raw_request: Request) -> Response:
        return _response(await _models(raw_request).unload_lora_adapter(request))

    return router


def _models(request: Request) -> Any:
    models = request.app.state.openai_serving_models
    if service_of(models) is None:
        # The plugin is off: so are the host's own routes.
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return models


def _response(answer: str | ErrorResponse) -> Response:
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), answer.error.code)
    return Response(answer)


def _error(message: str, status: HTTPStatus) -> Any:
    return create_error_response(message, _TYPES.get(status, "InternalServerError"), status)
