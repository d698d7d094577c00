"""The hooks of this process: made once, from the settings."""

from __future__ import annotations

import logging

from lora_plugin.errors import Code, SettingsError
from lora_plugin.hooks.builtin import BUILTIN
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hooks.plugins import PluginError
from lora_plugin.hub.hook import HubPlugin
from lora_plugin.settings import Settings

logger = logging.getLogger("lora_plugin.hooks")


def load_hooks(settings: Settings) -> HookManager:
    """The manager of the plugins that are named, installed or built in, less the blocked ones.

    Raises:
        SettingsError: SETTINGS_INVALID: a plugin cannot be imported, or does not fit the specs.
    """
    builtin = {**BUILTIN, "hub": HubPlugin(settings.hub_allow, settings.max_adapter_bytes)}
    unused = () if settings.hub_allow else ("hub",)
    try:
        hooks = HookManager.load(settings.hooks, {*settings.hooks_block, *unused}, builtin)
    except PluginError as error:
        raise SettingsError(
            Code.SETTINGS_INVALID,
            str(error),
            hint="correct it or PYTHONPATH, or change LORA_PLUGIN_HOOKS or LORA_PLUGIN_HOOKS_BLOCK",
        ) from error
    if hooks.third_party:
        logger.info("plugins: %s", ", ".join(hooks.third_party))
    return hooks
