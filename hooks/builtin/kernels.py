"""The adapters' share of a layer is computed by the plugin's own kernels."""

from __future__ import annotations

from lora_plugin.hooks.specs import hookimpl
from lora_plugin.hooks.types import Compute, LinearLayer


@hookimpl
def make_linear(layer: LinearLayer) -> Compute:
    return layer.compute
