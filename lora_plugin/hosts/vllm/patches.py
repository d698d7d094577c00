"""Every place where vLLM is changed, in one table."""

from __future__ import annotations

import functools
from typing import Any

from lora_plugin.hosts.vllm import (
    app,
    base_model,
    config,
    core,
    engine,
    host_metrics,
    incoming,
    load_routes,
    lost,
    model_list,
    runner,
    scheduler,
    server,
    vllm_0_30,
)
from lora_plugin.hosts.vllm.seams import Seam
from lora_plugin.hosts.vllm.worker import WorkerAdapters

_ARGS = "vllm.engine.arg_utils"
_MODELS = "vllm.entrypoints.openai.models.serving"
_SERVING = "vllm.entrypoints.serve.engine.serving"
_POOLING = "vllm.entrypoints.pooling.base.serving"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_CORE = "vllm.v1.engine.core"
_MIXIN = "vllm.v1.worker.lora_model_runner_mixin"
_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_runner"
_V2_LORA = "vllm.v1.worker.gpu.lora_utils"


def _as_it_is(original: Any) -> Any:
    return original


CREATE_ENGINE_CONFIG = Seam(
    _ARGS, "EngineArgs.create_engine_config", config.configure_engine, ("self",), "LoRA is on without a flag"
)

_OF_ALL: tuple[Seam, ...] = (
    CREATE_ENGINE_CONFIG,
    Seam(_ARGS, "EngineArgs.add_cli_args", config.add_cli_defaults, ("parser",), "the plugin's defaults"),
    Seam(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        config.keep_compile_mode,
        ("vllm_config",),
        "LoRA switches the CPU's compile mode off",
    ),
    Seam(
        "vllm.entrypoints.launchers.app",
        "init_entrypoints_middleware",
        app.add_middleware,
        ("args", "app"),
        "headers in and out, and the end of a response: the scope of a request",
    ),
    Seam(
        "vllm.entrypoints.serve.instrumentator.metrics",
        "attach_router",
        host_metrics.attach_metrics,
        ("app",),
        "/metrics shows the plugin's metrics too, and vllm:lora_requests_info as it is",
    ),
    Seam(
        _MODELS,
        "OpenAIServingModels.init_static_loras",
        server.init_static_loras,
        ("self",),
        "awaited before the server listens: watcher, catalog and admin endpoint start",
    ),
    Seam(
        _MODELS,
        "OpenAIServingModels.show_available_models",
        server.show_available_models,
        ("self",),
        "/v1/models lists the catalog",
    ),
    Seam(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        base_model.keep_norms,
        ("layer", "remove_weight"),
        "the weight is freed, and DoRA needs the norms of its rows",
    ),
    Seam(
        _MODELS,
        "OpenAIServingModels.load_lora_adapter",
        load_routes.load_lora_adapter,
        ("self", "request"),
        "loads by the directory, in every engine",
    ),
    Seam(
        _MODELS,
        "OpenAIServingModels.unload_lora_adapter",
        load_routes.unload_lora_adapter,
        ("self", "request"),
        "forgets only the name",
    ),
    Seam(
        "vllm.entrypoints.openai.models.api_router",
        "attach_router",
        model_list.attach_router,
        ("app",),
        "writing out thousands of names holds up every stream",
    ),
    Seam(
        "vllm.entrypoints.serve.lora.api_router",
        "attach_router",
        load_routes.attach_router,
        ("app",),
        "controllers load and unload without VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    ),
    Seam(
        _SERVING,
        "BaseServing._check_model",
        incoming.check_model,
        ("self", "request"),
        "a request's model becomes a version that is ready",
    ),
    Seam(
        _SERVING,
        "BaseServing._maybe_get_adapters",
        incoming.maybe_get_adapters,
        ("self", "request"),
        "the version that was selected, not the newest",
    ),
    Seam(
        _SERVING,
        "BaseServing._get_active_default_mm_loras",
        incoming.no_default_mm_loras,
        ("self", "request"),
        "hands base-model requests to an adapter named like a content part",
    ),
    Seam(
        _POOLING,
        "PoolingBaseServing._check_model",
        incoming.check_pooling_model,
        ("self", "request"),
        "its answer is ignored by its caller",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.shutdown",
        server.shutdown,
        ("self",),
        "watcher and admin endpoint end",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.generate",
        lost.generate,
        ("self", "prompt", "sampling_params", "request_id"),
        "a request whose adapter was lost is told why",
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        "AsyncLLM.encode",
        lost.encode,
        ("self", "prompt", "pooling_params", "request_id"),
        "a request whose adapter was lost is told why",
    ),
    Seam(
        "vllm.config.scheduler",
        "SchedulerConfig.get_scheduler_cls",
        scheduler.choose_scheduler,
        ("self",),
        "the mixin goes over whichever scheduler is in use",
    ),
    Seam(
        "vllm.v1.executor.abstract",
        "Executor.__init__",
        engine.remember_executor,
        ("self", "vllm_config"),
        "the scheduler's line to the workers",
    ),
    Seam(
        _CORE,
        "EngineCore.lora_plugin_call",
        lambda _: core.call,
        None,
        "one utility method for the API servers",
        adds=True,
    ),
    Seam(_CORE, "EngineCore.add_lora", core.add_lora, ("self", "lora_request"), "reads in the engine's step"),
    Seam(
        _CORE,
        "EngineCore.remove_lora",
        functools.partial(core.by_pool, command="evict"),
        ("self", "lora_id"),
        "the pool decides",
    ),
    Seam(
        _CORE,
        "EngineCore.pin_lora",
        functools.partial(core.by_pool, command="pin"),
        ("self", "lora_id"),
        "the pool decides",
    ),
    Seam(
        _CORE,
        "EngineCore.sleep",
        core.sleep,
        ("self", "level", "mode"),
        "from level 2 on the device's memory is lost",
    ),
    Seam(
        _CORE,
        "EngineCore.wake_up",
        core.then_recover,
        ("self", "tags"),
        "adapters in use are loaded again",
    ),
    Seam(
        _CORE,
        "EngineCore.collective_rpc",
        core.then_recover,
        ("self", "method", "timeout", "args", "kwargs"),
        "weights may have been replaced, which DoRA, trained biases and tokens are relative to",
    ),
    Seam(_CORE, "EngineCore.list_loras", core.list_loras, ("self",), "the pool knows"),
    Seam(
        _MIXIN,
        "LRUCacheWorkerLoRAManager",
        lambda original: WorkerAdapters,
        ("vllm_config", "device", "embedding_modules"),
        "slots, padding, per-token gathers and reads in a step are replaced",
    ),
    Seam(
        _MIXIN,
        "LoRAModelRunnerMixin.set_active_loras",
        runner.set_active_loras,
        ("self", "input_batch", "num_scheduled_tokens", "num_sampled_tokens"),
        "a tuple entry per token",
    ),
    Seam(
        _MIXIN,
        "LoRAModelRunnerMixin._set_active_loras",
        runner.set_mapping,
        ("self", "prompt_lora_mapping", "token_lora_mapping", "lora_requests"),
        "the V2 runner's batch",
    ),
    Seam(
        _MIXIN,
        "LoRAModelRunnerMixin.reset_lora_state",
        runner.reset_lora_state,
        ("self",),
        "called when the base model's weights were replaced",
    ),
    Seam(
        _V1,
        "GPUModelRunner.execute_model",
        runner.execute_model,
        ("self", "scheduler_output"),
        "the scheduler's orders come before the step",
    ),
    Seam(
        _V1,
        "GPUModelRunner._get_prompt_logprobs_dict",
        runner.prompt_logprobs,
        ("self", "hidden_states", "num_scheduled_tokens"),
        "makes logits of other rows than the step's sampled ones",
    ),
    Seam(
        "vllm.model_executor.layers.fused_moe.layer",
        "FusedMoEConfig",
        config.experts_without_lora,
        None,
        "expert layers are not wrapped, and told that LoRA is on a CPU's base request fails",
    ),
    Seam(
        _V2,
        "GPUModelRunner.execute_model",
        runner.execute_model,
        ("self", "scheduler_output"),
        "the scheduler's orders come before the step",
    ),
    Seam(_V2_LORA, "LoraState.__init__", runner.wide_ids, ("self", "max_num_reqs"), "ids have 62 bits"),
    Seam(
        _V2_LORA,
        "LoraState.make_lora_inputs",
        runner.make_lora_inputs,
        ("self", "req_ids", "idx_mapping", "num_scheduled_tokens"),
        "a tuple entry per token",
    ),
)

_SINCE_0_31 = (
    Seam(
        _SCHEDULER,
        "Scheduler._handle_blocked_waiting_request",
        _as_it_is,
        ("self", "request"),
        "overridden by the mixin: asked for every waiting request before it joins a step",
        keeps=True,
    ),
)

_OF_0_30 = (
    Seam(
        _SCHEDULER,
        "Scheduler._try_promote_blocked_waiting_request",
        _as_it_is,
        ("self", "request"),
        "vLLM 0.30 only: overridden for the one above, which it lacks",
        keeps=True,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._is_blocked_waiting_status",
        _as_it_is,
        ("status",),
        "vLLM 0.30 only: overridden, so that the former is asked for every waiting request",
        keeps=True,
    ),
    Seam(
        _SCHEDULER,
        "Scheduler._enqueue_waiting_request",
        _as_it_is,
        ("self", "request"),
        "vLLM 0.30 only: overridden, so that new requests are queued as ever",
        keeps=True,
    ),
    Seam(
        "vllm.v1.core.kv_cache_utils",
        "_gen_lora_extra_hash_keys",
        vllm_0_30.lora_hash_keys,
        ("request",),
        "vLLM 0.30 only: the prefix cache's key is the adapter's name, whatever its version",
    ),
)

SEAMS = _OF_ALL + (_OF_0_30 if vllm_0_30.IS_HOST else _SINCE_0_31)
