"""The commands that ask or change a running server, once."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from lora_plugin.cli import human
from lora_plugin.cli.client import AdminClient
from lora_plugin.cli.output import Said, add_format, confirm, say, show, wrong_usage
from lora_plugin.cli.target import admin_token, admin_url, trusted_certificate

Run = Callable[[Namespace], None]
Fill = Callable[[ArgumentParser], None]

DONE = {"evict": "evicted", "pin": "pinned", "unpin": "unpinned", "reload": "looked at again"}


def client_of(args: Namespace) -> AdminClient:
    """The endpoint that a command's options and the environment name."""
    try:
        url = admin_url(args.admin, os.environ)
    except ValueError as error:
        wrong_usage(args, str(error))
    return AdminClient(url, admin_token(os.environ), trusted_certificate(os.environ))


def add_admin(parser: ArgumentParser) -> None:
    """The option that names the endpoint."""
    text = "the admin endpoint; default: from LORA_PLUGIN_ADMIN_HOST and LORA_PLUGIN_ADMIN_PORT"
    parser.add_argument("--admin", metavar="URL", help=text)


def asks(run: Run, *more: Fill) -> Fill:
    """Fills the parser of a command that asks the endpoint and prints what it says."""

    def fill(parser: ArgumentParser) -> None:
        for add in (add_format, add_admin, *more):
            add(parser)
        parser.set_defaults(run=run)

    return fill


def _named(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the adapter's name")


def _sure(parser: ArgumentParser) -> None:
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _filters(parser: ArgumentParser) -> None:
    parser.add_argument("--state", help="only discovered, settling, listed, rejected or unloaded ones")
    parser.add_argument("-q", metavar="TEXT", help="only names that contain TEXT")
    parser.add_argument("--sort", choices=("name", "requests", "used", "size"), help="default: name")


def _load_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="for it to be loaded; default: 60"
    )
    parser.add_argument("--hub", metavar="ORG/REPO", help="where it comes from, if the server allows it")
    parser.add_argument("--revision", help="branch, tag or commit of --hub")


def _unload_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--drain",
        metavar="SECONDS",
        help="requests that still run then are ended; abort: at once; without it they finish",
    )


def _list(args: Namespace) -> None:
    views = client_of(args).adapters(state=args.state, q=args.q, sort=args.sort)
    show(args, views, human.adapters, [view["name"] for view in views])


def _show(args: Namespace) -> None:
    show(args, client_of(args).adapter(args.name), human.adapter, [args.name])


def _pool(args: Namespace) -> None:
    pool = client_of(args).pool()
    resident = {extent["adapter"] for engine in pool["engines"] for extent in engine["extents"]}
    show(args, pool, human.pool, sorted(resident))


def _routing(args: Namespace) -> None:
    view = client_of(args).routing()
    show(args, view, human.routing, [each["name"] for each in (*view["aliases"], *view["compositions"])])


def _load(args: Namespace) -> None:
    source = {"hub": args.hub, "revision": args.revision} if args.hub else None
    status, view = client_of(args).load(args.name, source, args.wait)
    words = {200: "was loaded already", 201: "loaded", 202: "still being loaded"}[status]
    if status == 202 and view["reason"]:
        # It waits for its files, or is being fetched.
        words = f"not loaded yet: {human.reason(view['reason'])}"
    say(args, f"{args.name}: {words}")
    show(args, view, lambda data: human.adapters([data]), [args.name])
    if status == 202 and args.wait:
        raise Said


def _change(args: Namespace) -> None:
    view = client_of(args).change(args.command, args.name)
    say(args, f"{args.name}: {DONE[args.command]}")
    show(args, view, lambda data: human.adapters([data]), [args.name])


def _unload(args: Namespace) -> None:
    client = client_of(args)
    confirm(args, f"stop serving {args.name} until its files change?")
    view = client.unload(args.name, args.drain)
    say(args, f"{args.name}: unloaded")
    show(args, view, lambda data: human.adapters([data]), [args.name])


COMMANDS: tuple[tuple[str, str, Fill], ...] = (
    ("list", "list the adapters", asks(_list, _filters)),
    ("show", "show one adapter", asks(_show, _named)),
    ("pool", "show slabs, extents and host memory", asks(_pool)),
    ("routing", "show aliases and compositions", asks(_routing)),
    ("load", "load an adapter into host memory now", asks(_load, _named, _load_options)),
    ("reload", "look at an adapter's files again", asks(_change, _named)),
    ("evict", "take an adapter out of device and host memory", asks(_change, _named)),
    ("pin", "keep an adapter on the device", asks(_change, _named)),
    ("unpin", "let a pinned adapter be evicted again", asks(_change, _named)),
    (
        "unload",
        "stop serving an adapter until its files change",
        asks(_unload, _named, _unload_options, _sure),
    ),
)
