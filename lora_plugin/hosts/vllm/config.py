"""The plugin's say in the host's configuration: defaults, refusals, and whether it is on at all."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import lora_plugin
from lora_plugin.admin import tls
from lora_plugin.errors import Code, HostIncompatible, SettingsError
from lora_plugin.extensions.loading import load_hooks
from lora_plugin.hooks.manager import HookManager
from lora_plugin.layout import DEFAULT_MAX_RANK
from lora_plugin.pool.extents import round_up
from lora_plugin.pool.pool import GRANULE
from lora_plugin.settings import Settings, load_settings

logger = logging.getLogger("lora_plugin")

KEY = "lora_plugin"
DEFAULT_MAX_LORAS = 4


def active(vllm_config: Any) -> bool:
    """Whether this engine was configured with the plugin on; raises when by another version of it.

    Raises:
        HostIncompatible: another process of the same server runs another version of the plugin.
    """
    extra = vllm_config.additional_config
    marker = extra.get(KEY) if isinstance(extra, dict) else None
    if marker is None or vllm_config.lora_config is None:
        return False
    if marker["version"] != lora_plugin.__version__:
        raise HostIncompatible(
            Code.HOST_INCOMPATIBLE,
            "the processes of this server run different versions of the plugin",
            expected=marker["version"],
            found=lora_plugin.__version__,
            hint="install the same version on every node",
        )
    return True


def required_settings() -> Settings:
    """The settings, in a process where the plugin is known to be on.

    Raises:
        SettingsError: they are not set here (a node that was started without them).
    """
    settings = load_settings()
    if settings is None:
        raise SettingsError(
            Code.SETTINGS_INVALID,
            "this process was started without the plugin's settings",
            expected="LORA_PLUGIN_ADAPTER_DIR, as in the API server's environment",
            hint="pass the LORA_PLUGIN_* variables to every node",
        )
    return settings


@functools.cache
def process_hooks() -> HookManager:
    """This process's hooks, made at the first call.

    Raises:
        SettingsError: a plugin does not fit.
    """
    return load_hooks(required_settings())


def arena_shape(lora_config: Any) -> tuple[int, int]:
    """Slabs and rows of a slab that the host's flags promise memory for."""
    return int(lora_config.max_loras), round_up(int(lora_config.max_lora_rank), GRANULE)


def add_cli_defaults(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `EngineArgs.add_cli_args`: the plugin's defaults, so that explicit flags still win."""

    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        parser.set_defaults(max_loras=DEFAULT_MAX_LORAS, max_lora_rank=DEFAULT_MAX_RANK)
        return parser

    return add_cli_args


def configure_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `EngineArgs.create_engine_config`: LoRA on, contradictions refused, the plugin's mark set."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = load_settings()
        # None: `--enable-lora` was not given. False: the operator (or `LLM(...)`) said no.
        if settings is None or self.enable_lora is False:
            self.enable_lora = bool(self.enable_lora)
            return original(self, *args, **kwargs)
        _refuse_contradictions(self)
        process_hooks()
        if not kwargs.get("headless"):  # a node without API servers has no admin endpoint
            tls.configured(settings)
        self.enable_lora = True
        self.additional_config = {**self.additional_config, KEY: {"version": lora_plugin.__version__}}
        if self.max_cpu_loras is not None:
            logger.warning("--max-cpu-loras is not used; LORA_PLUGIN_HOST_MEMORY is the host cache's budget")
            self.max_cpu_loras = None
        vllm_config = original(self, *args, **kwargs)
        reason = _cannot_take_lora(vllm_config)
        if reason is not None:
            logger.warning("%s: starting with the plugin off", reason)
            vllm_config.lora_config = None
            vllm_config.additional_config.pop(KEY)
        else:
            _refuse_kernels(settings.kernels, vllm_config)
        return vllm_config

    return create_engine_config


def keep_compile_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the CPU platform's config check, which switches compilation off when it sees LoRA."""

    def check_and_update_config(vllm_config: Any) -> None:
        if vllm_config.lora_config is None or not active(vllm_config):
            original(vllm_config)
            return
        lora_config, vllm_config.lora_config = vllm_config.lora_config, None
        try:
            original(vllm_config)
        finally:
            vllm_config.lora_config = lora_config

    return check_and_update_config


def experts_without_lora(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `FusedMoEConfig` as the expert layers make it: their LoRA switch stays off."""

    def make_config(*args: Any, **kwargs: Any) -> Any:
        kwargs["is_lora_enabled"] = False
        return original(*args, **kwargs)

    return make_config


def _refuse_contradictions(args: Any) -> None:
    refused = [
        (args.fully_sharded_loras, "--fully-sharded-loras", "leave it out: the arena shards what pays"),
        (args.default_mm_loras, "--default-mm-loras", "put the adapters into the watched directory"),
        (args.enable_tower_connector_lora, "--enable-tower-connector-lora", "leave it out"),
        (args.pipeline_parallel_size > 1, "--pipeline-parallel-size", "use tensor parallelism"),
        (
            os.environ.get("VLLM_USE_RUST_FRONTEND") == "1",
            "VLLM_USE_RUST_FRONTEND=1",
            "use the Python API server",
        ),
        (not isinstance(args.additional_config, dict), "--additional-config", "give it as a JSON object"),
    ]
    for given, flag, hint in refused:
        if given:
            raise SettingsError(
                Code.SETTINGS_INVALID,
                f"{flag} cannot be combined with the LoRA plugin",
                hint=f"{hint}, or set LORA_PLUGIN_ENABLED=0",
            )


def _refuse_kernels(requested: str, vllm_config: Any) -> None:
    """Kernels asked for by name that cannot be had end the start here, before the model is loaded."""
    from lora_plugin.kernels import choose

    if requested == "auto":
        return
    try:
        choose(requested, vllm_config.device_config.device_type, vllm_config.lora_config.lora_dtype)
    except ValueError as error:
        raise SettingsError(
            Code.SETTINGS_INVALID, "LORA_PLUGIN_KERNELS does not fit this machine", found=str(error)
        ) from error


def _cannot_take_lora(vllm_config: Any) -> str | None:
    from vllm.model_executor.models import supports_lora

    model = vllm_config.model_config
    model_class, architecture = model.registry.resolve_model_cls(model.architectures, model)
    return None if supports_lora(model_class) else f"{architecture} cannot take LoRA adapters"
