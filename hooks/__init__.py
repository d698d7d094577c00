"""The hooks: where plugins of the plugin take part. Needs pluggy only."""

from lora_plugin.hooks.specs import hookimpl
from lora_plugin.hooks.types import (
    Adapter,
    Batch,
    Compute,
    LinearLayer,
    Part,
    Refusal,
    Request,
    Selection,
    Source,
    WaitingRequest,
)

__all__ = [
    "Adapter",
    "Batch",
    "Compute",
    "LinearLayer",
    "Part",
    "Refusal",
    "Request",
    "Selection",
    "Source",
    "WaitingRequest",
    "hookimpl",
]
