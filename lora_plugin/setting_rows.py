"""The settings of an environment, each with its value and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lora_plugin.setting_errors import MASK, is_secret
from lora_plugin.settings import Settings, load_settings


class SettingRow(NamedTuple):
    """One setting as it is in force.

    Attributes:
        variable: its own name.
        value: as it would be set; a secret is masked.
        source: the variable it was read from, or "default".
        description: what it is for.
    """

    variable: str
    value: str
    source: str
    description: str


def setting_rows(environ: Mapping[str, str]) -> list[SettingRow]:
    """One row per setting, in the order of the class.

    Where the plugin is off, what is set is shown unchecked. Raises SettingsError like the server's start.
    """
    settings = load_settings(environ)
    shown = {} if settings is None else settings.shown()
    rows = []
    for names, doc in zip(Settings.variables().values(), Settings.describe(), strict=True):
        source = next((name for name in names if environ.get(name, "").strip()), None)
        unchecked = doc.default if source is None else _masked(source, environ[source])
        value = shown.get(doc.variable, unchecked)
        rows.append(SettingRow(doc.variable, value, source or "default", doc.description))
    return rows


def _masked(variable: str, value: str) -> str:
    return MASK if is_secret(variable) else value.strip()
