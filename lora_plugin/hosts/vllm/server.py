"""The API server's side: requests are routed by the catalog, and wait here for their adapter."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission
from vllm.exceptions import GracefulHTTPError, VLLMNotFoundError, VLLMValidationError
from vllm.lora.request import LoRARequest

from lora_plugin.errors import AdapterNotFound, Code, LoraPluginError, SettingsError
from lora_plugin.hooks import Request
from lora_plugin.hosts.vllm.config import active, process_hooks, required_settings
from lora_plugin.hosts.vllm.link import EngineLink
from lora_plugin.hosts.vllm.requests import to_lora_request
from lora_plugin.routing.scope import Chosen, RequestScope, current_request
from lora_plugin.service import Service

logger = logging.getLogger("lora_plugin")

_MANAGED = (
    "adapters are managed by the watched directory: copy a folder into it to load one, delete the folder or "
    "call the admin endpoint to unload it"
)


class CatalogView(Mapping[str, LoRARequest]):
    """`OpenAIServingModels.lora_requests`: the names served, and for each the version of this request."""

    def __init__(self, service: Service, base_model: str) -> None:
        self._service = service
        self._base_model = base_model

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._service.serves(name)

    def __getitem__(self, name: str) -> LoRARequest:
        chosen = current_request().chosen
        if chosen is None or chosen.spec is None or chosen.spec.name != name:
            raise KeyError(name)
        return to_lora_request(chosen.spec, self._base_model)

    def __iter__(self) -> Iterator[str]:
        return iter(self._service.names())

    def __len__(self) -> int:
        return len(self._service.names())


def init_static_loras(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `OpenAIServingModels.init_static_loras`, awaited before the server listens."""

    @functools.wraps(original)
    async def method(self: Any) -> None:
        vllm_config = self.engine_client.vllm_config
        if not active(vllm_config):
            await original(self)
            return
        _refuse_static(self.static_lora_modules)
        link = EngineLink(self.engine_client)
        service = Service(
            required_settings(),
            link,
            await link.layout(),
            process_hooks(),
            base_models=[model.name for model in self.base_model_paths],
            with_admin=vllm_config.parallel_config._api_process_rank <= 0,
        )
        await service.start()
        self.engine_client.lora_plugin_service = self.lora_plugin_service = service
        self.lora_requests = CatalogView(service, self.base_model_paths[0].name)

    return method


def _refuse_static(modules: list[LoRAModulePath] | None) -> None:
    if modules:
        raise SettingsError(
            Code.SETTINGS_INVALID,
            "--lora-modules cannot be combined with the LoRA plugin",
            found=", ".join(module.name for module in modules),
            hint="copy the folders into the watched directory, or set LORA_PLUGIN_ENABLED=0",
        )


def shutdown(original: Callable[..., None]) -> Callable[..., None]:
    """Around `AsyncLLM.shutdown`: watcher and admin endpoint end with the engine."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        service: Service | None = getattr(self, "lora_plugin_service", None)
        if service is not None:
            service.stop()
        original(self, *args, **kwargs)

    return method


def check_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `BaseServing._check_model`: the request's model becomes a version that is ready, or an error."""
    from vllm.entrypoints.scale_out.derender.serving import ServingDerender
    from vllm.entrypoints.scale_out.render.serving import ServingRender
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

    # They only need to know that the name is right; whatever runs the model needs the adapter.
    names_only = (ServingTokenization, ServingRender, ServingDerender)

    @functools.wraps(original)
    async def method(self: Any, request: Any) -> Any:
        service: Service | None = getattr(self.models, "lora_plugin_service", None)
        if service is None:
            return await original(self, request)
        if not request.model or self.models.is_base_model(request.model):
            current_request().chosen = None if isinstance(self, names_only) else Chosen(None)
            return await original(self, request)
        if self.request_logger is not None:
            self.request_logger.log_request_body(request)
        try:
            await _select(service, self.models, request, stage=not isinstance(self, names_only))
        except AdapterNotFound:
            return await original(self, request)
        except LoraPluginError as error:
            status = HTTPStatus(error.status)
            return self.create_error_response(str(error), _error_type(status), status, param="model")
        return None

    return method


def check_pooling_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `PoolingBaseServing._check_model`, whose answer is ignored: refusals are raised."""

    @functools.wraps(original)
    async def method(self: Any, request: Any) -> Any:
        service: Service | None = getattr(self.models, "lora_plugin_service", None)
        if service is None:
            return await original(self, request)
        if not request.model or self.models.is_base_model(request.model):
            current_request().chosen = Chosen(None)
            return await original(self, request)
        try:
            await _select(service, self.models, request, stage=True)
        except AdapterNotFound:
            raise VLLMNotFoundError(f"The model `{request.model}` does not exist.") from None
        except LoraPluginError as error:
            if error.status == HTTPStatus.BAD_REQUEST:
                raise VLLMValidationError(str(error), parameter="model") from None
            raise GracefulHTTPError(str(error), HTTPStatus(error.status)) from None
        return None

    return method


async def _select(service: Service, models: Any, body: Any, *, stage: bool) -> None:
    scope = current_request()
    service.authorize(_hook_request(scope, models, body), body.model)
    if stage:
        scope.chosen = Chosen(await service.select(body.model, scope, several=_takes_several(body)))
    else:
        service.check(body.model)
        scope.chosen = None


def _takes_several(body: Any) -> bool:
    """Whether a response takes several engine requests: beam search, the Responses API's tool turns."""
    tool_turns = hasattr(body, "previous_response_id") and bool(body.tools)
    return tool_turns or bool(getattr(body, "use_beam_search", False))


def _hook_request(scope: RequestScope, models: Any, body: Any) -> Request:
    # Views, not copies: a prompt may be long.
    fields = ChainMap(body.model_extra or {}, vars(body))
    base_models = tuple(model.name for model in models.base_model_paths)
    return Request(body.model, fields, scope.headers, scope.path, base_models)


def _error_type(status: HTTPStatus) -> str:
    return {
        HTTPStatus.BAD_REQUEST: "BadRequestError",
        HTTPStatus.UNAUTHORIZED: "AuthenticationError",
        HTTPStatus.FORBIDDEN: "PermissionDeniedError",
        HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
        HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    }.get(status, "InternalServerError")


def maybe_get_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `_maybe_get_adapters`: what was selected; an unstaged name (tokenize) is the base model's."""

    @functools.wraps(original)
    def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        service: Service | None = getattr(self.models, "lora_plugin_service", None)
        if service is None or not request.model or self.models.is_base_model(request.model):
            return original(self, request, *args, **kwargs)
        # The version stays this request's, also when the folder was deleted since it was selected.
        chosen = current_request().chosen
        if chosen is not None and chosen.spec is not None and chosen.spec.name == request.model:
            return to_lora_request(chosen.spec, self.models.base_model_paths[0].name)
        if service.serves(request.model):
            return None
        return original(self, request, *args, **kwargs)

    return method


def no_default_mm_loras(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `_get_active_default_mm_loras`, which would take an adapter named like a content part."""

    @functools.wraps(original)
    def method(self: Any, request: Any) -> Any:
        if getattr(self.models, "lora_plugin_service", None) is None:
            return original(self, request)
        # --default-mm-loras is refused with the plugin, so the operator configured none.
        return None

    return method


def show_available_models(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `OpenAIServingModels.show_available_models`: the catalog's names, digests not needed."""

    @functools.wraps(original)
    async def method(self: Any) -> ModelList:
        service: Service | None = getattr(self, "lora_plugin_service", None)
        if service is None:
            models: ModelList = await original(self)
            return models
        models = await self.registry.show_available_models()
        parent = self.base_model_paths[0].name
        models.data.extend(
            ModelCard(id=name, root=name, parent=parent, permission=[ModelPermission()])
            for name in service.names()
        )
        return models

    return method


def managed_by_directory(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `load_lora_adapter` and `unload_lora_adapter`: a clear refusal instead of a second truth."""
    from vllm.entrypoints.serve import create_error_response

    @functools.wraps(original)
    async def method(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "lora_plugin_service", None) is None:
            return await original(self, request, *args, **kwargs)
        await asyncio.sleep(0)
        return create_error_response(_MANAGED, "BadRequestError", HTTPStatus.BAD_REQUEST)

    return method
