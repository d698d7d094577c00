"""The entry point that vLLM calls in every process it starts."""

from __future__ import annotations

import sys

from lora_plugin.switch import wanted

# Runs the plugins only to look at model classes; no engine is ever made there.
_REGISTRY = "vllm.model_executor.models.registry"


def register() -> None:
    """Put the plugin into vLLM, if the environment asks for it; a second call changes nothing.

    Starts nothing and refuses nothing: it runs for every `vllm` subcommand.
    """
    if not wanted() or _main_module() == _REGISTRY:
        return
    from lora_plugin.hosts.vllm.install import install

    install()


def _main_module() -> str | None:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return None if spec is None else str(spec.name)
