"""Plugins made of functions."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from lora_plugin.hooks import Request, Selection, hookimpl
from lora_plugin.hooks.plugins import Plugin


def plugin(name: str, *functions: Callable[..., Any], builtin: bool = False) -> Plugin:
    """A module with these functions as hook implementations."""
    module = ModuleType(name)
    for function in functions:
        setattr(module, function.__name__, hookimpl(function))
    return Plugin(name, module, builtin)


def selecting(name: str, adapter: str | None, builtin: bool = False) -> Plugin:
    def select_adapter(request: Request) -> Selection | None:
        return None if adapter is None else Selection(adapter)

    return plugin(name, select_adapter, builtin=builtin)
