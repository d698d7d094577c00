"""What the plugin itself does by its own hooks, by the name that `LORA_PLUGIN_HOOKS_BLOCK` calls it."""

from __future__ import annotations

from collections.abc import Mapping

from lora_plugin.hooks.builtin import kernels, naming

BUILTIN: Mapping[str, object] = {**naming.WAYS, "kernels": kernels}
"""By name, in the order in which they are asked."""
