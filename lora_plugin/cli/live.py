"""The commands that follow a running server: its events, and its pool and adapters."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from itertools import islice
from typing import Any

from lora_plugin.cli import human
from lora_plugin.cli.client import AdminClient, Unreachable
from lora_plugin.cli.local import extra
from lora_plugin.cli.output import add_format, complain, resolved
from lora_plugin.cli.remote import Fill, add_admin, client_of

_TRIES = 10
_PAUSE_SECONDS = 1.0


def _watch(args: Namespace) -> None:
    for event in islice(_followed(client_of(args), args.after), args.count):
        _print_event(event, resolved(args.format))


def _followed(client: AdminClient, after: str | None) -> Iterator[dict[str, Any]]:
    """The events, over as many connections as it takes; raises Unreachable when none can be had."""
    left = 1
    while True:
        try:
            for event in client.events(after):
                # Somebody is there: from now on a lost connection is tried again, and nothing is missed.
                left, after = _TRIES, after or "0"
                if event is not None:
                    after = event["id"]
                    yield event
            raise Unreachable("the server closed the connection")
        except Unreachable as error:
            left -= 1
            if not left:
                raise
            complain(f"{error}; trying again")
            time.sleep(_PAUSE_SECONDS)


def _print_event(event: dict[str, Any], how: str) -> None:
    if how == "json":
        print(json.dumps(event), flush=True)
    elif how == "human":
        print(human.event(event), flush=True)
    elif "name" in event:
        print(event["name"], flush=True)


def _top(args: Namespace) -> None:
    extra(args, "rich")
    from rich.console import Console
    from rich.live import Live

    from lora_plugin.cli.screen import Screen

    client, screen, console = client_of(args), Screen(), Console()
    if args.once:
        console.print(screen.frame(*_looked(client), console.height))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen.frame(*_looked(client), console.height), refresh=True)
            time.sleep(args.interval)


def _looked(client: AdminClient) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return client.pool(), client.adapters()


def _fill_watch(parser: ArgumentParser) -> None:
    add_format(parser)
    add_admin(parser)
    parser.add_argument("--after", metavar="ID", help="begin after this event; 0: with all that is held")
    parser.add_argument("--count", type=int, metavar="N", help="end after N events")
    parser.set_defaults(run=_watch)


def _fill_top(parser: ArgumentParser) -> None:
    add_admin(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="default: 1")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.set_defaults(run=_top)


COMMANDS: tuple[tuple[str, str, Fill], ...] = (
    ("watch", "print what happens to adapters, as it happens", _fill_watch),
    ("top", "show pool and adapters live", _fill_top),
)
