"""The settings of this environment, each with its value and where it came from."""

from __future__ import annotations

from collections.abc import Mapping

from lora_plugin.settings import Settings, load_settings

MASK = "****"


def setting_rows(environ: Mapping[str, str]) -> list[dict[str, str]]:
    """One row per setting: variable, value, source (the variable it was read from, or "default").

    Where the plugin is off, what is set is shown unchecked. Raises SettingsError like the server's start.
    """
    settings = load_settings(environ)
    shown = {} if settings is None else settings.shown()
    rows = []
    for names, doc in zip(Settings.variables().values(), Settings.describe(), strict=True):
        source = next((name for name in names if environ.get(name, "").strip()), None)
        unchecked = doc.default if source is None else _masked(source, environ[source])
        value = shown.get(doc.variable, unchecked)
        rows.append({"variable": doc.variable, "value": value, "source": source or "default"})
    return rows


def _masked(variable: str, value: str) -> str:
    return MASK if variable.endswith("_TOKEN") else value.strip()
