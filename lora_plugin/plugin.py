"""The entry point that vLLM calls in every process it starts."""

from __future__ import annotations

import sys

from lora_plugin.switch import forgotten, wanted

# Runs the plugins only to look at model classes; no engine is ever made there.
_REGISTRY = "vllm.model_executor.models.registry"


def register() -> None:
    """Put the plugin into vLLM, if the environment asks for it; a second call changes nothing.

    Starts nothing and refuses nothing: it runs for every `vllm` subcommand.
    """
    if not wanted() or _main_module() == _REGISTRY:
        _warn_of_what_is_forgotten()
        return
    from lora_plugin.hosts.vllm.install import install

    install()


def _warn_of_what_is_forgotten() -> None:
    """Once for a server: the host's other processes are children."""
    name = forgotten()
    if name is None:
        return
    import logging
    import multiprocessing

    if multiprocessing.parent_process() is None:
        text = "%s is set, LORA_PLUGIN_ADAPTER_DIR is not: the LoRA plugin is off"
        logging.getLogger("lora_plugin").warning(text, name)


def _main_module() -> str | None:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return None if spec is None else str(spec.name)
