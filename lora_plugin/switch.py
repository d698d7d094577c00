"""Whether the plugin is wanted at all, decided from the environment alone.

Every process of the host imports this first, most of them without any use for the plugin: nothing but the
standard library's smallest modules may be imported here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIX = "LORA_PLUGIN_"
_DIRECTORY_ALIAS = "NIM_PEFT_SOURCE"
_OFF = frozenset({"0", "f", "false", "n", "no", "off"})


def switched_off(environ: Mapping[str, str]) -> bool:
    """Whether `LORA_PLUGIN_ENABLED` says no (0, false, no, off; any case)."""
    return environ.get(f"{PREFIX}ENABLED", "").strip().lower() in _OFF


def wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether an adapter directory is set and the plugin is not switched off.

    A misspelt directory variable (`LORA_PLUGIN_ADAPTERS_DIR`) counts as set: the settings then refuse it by
    name, instead of the server starting without adapters.
    """
    environ = os.environ if environ is None else environ
    if switched_off(environ):
        return False
    return any(value.strip() and _names_directory(name) for name, value in environ.items())


def forgotten(environ: Mapping[str, str] | None = None) -> str | None:
    """A setting without effect, because no directory is set; None where there is none, or it is meant so."""
    environ = os.environ if environ is None else environ
    if wanted(environ) or switched_off(environ):
        return None
    given = sorted(name for name, value in environ.items() if name.startswith(PREFIX) and value.strip())
    return next((name for name in given if name != f"{PREFIX}ENABLED"), None)


def _names_directory(name: str) -> bool:
    return name == _DIRECTORY_ALIAS or (name.upper().startswith(PREFIX) and "DIR" in name.upper())
