"""The subcommands: data goes to stdout, words to stderr."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import lora_plugin
from lora_plugin.cli import human
from lora_plugin.cli.client import AdminClient, Refused, Unreachable
from lora_plugin.cli.target import admin_token, admin_url
from lora_plugin.errors import LoraPluginError
from lora_plugin.switch import wanted

CHANGES = {
    "evict": ("take an adapter out of device and host memory", "evicted"),
    "pin": ("keep an adapter on the device", "pinned"),
    "unpin": ("let a pinned adapter be evicted again", "unpinned"),
    "unload": ("stop serving an adapter until its files change", "unloaded"),
}


class Exit(IntEnum):
    """The exit codes."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; a usage error exits with 2 from within."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except Refused as error:
        _refusal(error.problem["detail"], error.problem)
        return Exit.REFUSED
    except LoraPluginError as error:
        _refusal(error.reason.message, error.reason.to_dict())
        return Exit.REFUSED
    except Unreachable as error:
        _say(str(error))
        _say("hint: is the server running? --admin URL names another endpoint")
        return Exit.UNREACHABLE
    return Exit.OK


def _parser() -> ArgumentParser:
    parser = ArgumentParser("lora-plugin", description="See and steer the adapters of a running server.")
    parser.add_argument("--version", action="version", version=f"lora-plugin {lora_plugin.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, text: str, run: Callable[[Namespace], None]) -> ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--format", choices=("human", "json"), default="human", help="default: human")
        sub.set_defaults(run=run, command=name, parser=sub)
        return sub

    listing = _remote(command("list", "list the adapters", _list))
    listing.add_argument("--state", help="only adapters in this state")
    listing.add_argument("-q", metavar="TEXT", help="only names that contain TEXT")
    _named(_remote(command("show", "show one adapter", _show)))
    _remote(command("pool", "show slabs, extents and host memory", _pool))
    for name, (text, _) in CHANGES.items():
        _named(_remote(command(name, text, _change)))
    command("config", "print the settings of this environment and where they come from", _settings)
    return parser


def _remote(parser: ArgumentParser) -> ArgumentParser:
    text = "the admin endpoint; default: from LORA_PLUGIN_ADMIN_HOST and LORA_PLUGIN_ADMIN_PORT"
    parser.add_argument("--admin", metavar="URL", help=text)
    return parser


def _named(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the adapter's name")


def _list(args: Namespace) -> None:
    _print(args, _client(args).adapters(args.state, args.q), human.adapters)


def _show(args: Namespace) -> None:
    _print(args, _client(args).adapter(args.name), human.adapter)


def _pool(args: Namespace) -> None:
    _print(args, _client(args).pool(), human.pool)


def _change(args: Namespace) -> None:
    client = _client(args)
    if args.command == "unload":
        view = client.unload(args.name)
    else:
        view = client.change(args.command, args.name)
    _say(f"{args.name}: {CHANGES[args.command][1]}")
    _print(args, view, lambda data: human.adapters([data]))


def _settings(args: Namespace) -> None:
    # Imported here: no other command needs pydantic.
    from lora_plugin.setting_rows import setting_rows

    if not wanted(os.environ):
        _say("the plugin is off: LORA_PLUGIN_ADAPTER_DIR is not set, or LORA_PLUGIN_ENABLED is 0")
    _print(args, [row._asdict() for row in setting_rows(os.environ)], human.settings)


def _client(args: Namespace) -> AdminClient:
    try:
        url = admin_url(args.admin, os.environ)
    except ValueError as error:
        args.parser.error(str(error))
    return AdminClient(url, admin_token(os.environ))


def _print(args: Namespace, data: Any, render: Callable[[Any], str]) -> None:
    print(json.dumps(data, indent=2) if args.format == "json" else render(data))


def _refusal(detail: str, fields: Mapping[str, Any]) -> None:
    _say(f"{detail} [{fields.get('code', 'unknown')}]")
    for key in ("expected", "found", "hint"):
        if fields.get(key):
            _say(f"{key}: {fields[key]}")


def _say(text: str) -> None:
    print(f"lora-plugin: {human.printable(text)}", file=sys.stderr)
