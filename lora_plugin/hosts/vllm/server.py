"""The API server's side: the service starts and ends with the host, and `/v1/models` lists what it serves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission
from vllm.lora.request import LoRARequest

from lora_plugin.errors import Code, SettingsError
from lora_plugin.hosts.vllm.adapter_requests import Requests
from lora_plugin.hosts.vllm.config import active, process_hooks, required_settings
from lora_plugin.hosts.vllm.link import EngineLink
from lora_plugin.hosts.vllm.requests import to_lora_request
from lora_plugin.routing.scope import current_request
from lora_plugin.service import Service

logger = logging.getLogger("lora_plugin")


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


def service_of(holder: Any) -> Service | None:
    """The service of the host's models or engine client; None where the plugin is off."""
    return getattr(holder, "lora_plugin_service", None)


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
        self.engine_client.lora_plugin_requests = Requests(link)
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
        service = service_of(self)
        if service is not None:
            service.stop()
        original(self, *args, **kwargs)

    return method


def show_available_models(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `OpenAIServingModels.show_available_models`: the catalog's names, digests not needed."""

    @functools.wraps(original)
    async def method(self: Any) -> ModelList:
        service = service_of(self)
        if service is None:
            models: ModelList = await original(self)
            return models
        models = await self.registry.show_available_models()
        parent = self.base_model_paths[0].name
        # Made once per name: with thousands it takes longer than a stream should wait.
        known: dict[str, ModelCard] = getattr(self, "lora_plugin_cards", {})
        self.lora_plugin_cards = {
            name: known.get(name)
            or ModelCard(id=name, root=name, parent=parent, permission=[ModelPermission()])
            for name in service.names()
        }
        models.data.extend(self.lora_plugin_cards.values())
        return models

    return method
