"""The commands that need no running server."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

from lora_plugin.cli import human
from lora_plugin.cli.output import add_format, say, show, wrong_usage
from lora_plugin.cli.remote import Fill
from lora_plugin.switch import wanted

SHELLS = ("bash", "zsh", "tcsh")
_DIRECTORY = "LORA_PLUGIN_ADAPTER_DIR"


def extra(args: Namespace, module: str) -> ModuleType:
    """A package of the extra `cli`; without it, wrong usage that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        wrong_usage(args, f"this needs {package}: pip install 'vllm-lora-plugin[cli]'")


def _config(args: Namespace) -> None:
    # Imported here: most commands have no use for pydantic.
    from lora_plugin.setting_rows import setting_rows

    if not wanted(os.environ):
        why = "LORA_PLUGIN_ADAPTER_DIR is not set in this shell, or LORA_PLUGIN_ENABLED is 0"
        say(args, f"the plugin would be off: {why}; a running server's own settings: GET /v1/config")
    rows = [row._asdict() for row in setting_rows(os.environ)]
    show(args, rows, human.settings, [row["variable"] for row in rows])


def _serve(args: Namespace) -> None:
    from lora_plugin.admin import tls
    from lora_plugin.settings import load_settings

    environ = {**os.environ, **({_DIRECTORY: args.adapters} if args.adapters else {})}
    settings = load_settings(environ)
    if settings is None:
        wrong_usage(args, f"which adapters? --adapters DIR or {_DIRECTORY}, and no LORA_PLUGIN_ENABLED=0")
    if "--headless" not in args.rest:
        tls.configured(settings)
    host = _host_command(args)
    # The host takes this process's place, so that signals and the exit code are its own.
    os.execve(host, [host, "serve", *args.rest], environ)  # noqa: S606


def _host_command(args: Namespace) -> str:
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        wrong_usage(args, "there is no command vllm, neither beside this Python nor on the PATH")
    return found


def _completion(args: Namespace) -> None:
    print(extra(args, "shtab").complete(args.root, args.shell))


def _fill_config(parser: ArgumentParser) -> None:
    add_format(parser)
    parser.set_defaults(run=_config)


def _fill_serve(parser: ArgumentParser) -> None:
    parser.usage = "lora-plugin serve [--adapters DIR] MODEL [flags of vllm serve ...]"
    parser.add_argument("--adapters", metavar="DIR", help=f"the watched directory; default: {_DIRECTORY}")
    parser.set_defaults(run=_serve, passes_on=True)


def _fill_completion(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=_completion)


COMMANDS: tuple[tuple[str, str, Fill], ...] = (
    ("serve", "start vLLM with the plugin", _fill_serve),
    ("config", "print the settings of this environment and where they come from", _fill_config),
    ("completion", "print a completion script for a shell", _fill_completion),
)
