"""What is called for a layer in every step: chosen once, when it is wrapped."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lora_plugin.errors import Code, SettingsError
from lora_plugin.hooks import Compute, LinearLayer
from lora_plugin.hooks.manager import HookManager
from lora_plugin.layout import Layer


def layer_compute(hooks: HookManager, layer: Layer, compute: Compute) -> Compute:
    """What the op calls for a layer; without plugins `compute` itself.

    Args:
        hooks: who is asked.
        layer: the wrapped layer.
        compute: what the kernels do for it.

    Raises:
        SettingsError: SETTINGS_INVALID: nobody has an answer, the built-in one being blocked.
    """
    widths = tuple(entry.local_out for entry in layer.slices)
    linear = LinearLayer(layer.name, str(layer.kind), layer.local_in, widths, compute)
    made = hooks.make_linear(linear)
    if made is None:
        raise SettingsError(
            Code.SETTINGS_INVALID,
            f"no plugin computes the adapters' share of {layer.name}",
            expected="an answer to make_linear for every layer, the plugin 'kernels' being blocked",
            hint="take 'kernels' out of LORA_PLUGIN_HOOKS_BLOCK",
        )
    observers = hooks.linear_observers(replace(linear, compute=made))
    return _observed(made, observers) if observers else made


def _observed(compute: Compute, observers: tuple[Compute, ...]) -> Compute:
    def call(y: Tensor, x: Tensor) -> None:
        compute(y, x)
        for observe in observers:
            observe(y, x)

    return call
