"""Where the commands write: data to stdout, words to stderr."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from lora_plugin.cli import human

FORMATS = ("auto", "human", "json", "quiet")


class Declined(Exception):
    """The person who was asked said no."""


class Said(Exception):
    """The answer is no, and was printed."""


def add_format(parser: ArgumentParser) -> None:
    """The option `--format` of a command that prints data."""
    text = "auto: human on a terminal, json elsewhere; quiet: names only"
    parser.add_argument("--format", choices=FORMATS, default="auto", help=text)


def show(args: Namespace, data: Any, render: Callable[[Any], str], names: Iterable[str] = ()) -> None:
    """Prints `data` as the command's format wants it; `names` are all that quiet prints."""
    match resolved(args.format):
        case "json":
            print(json.dumps(data, indent=2))
        case "human":
            print(render(data))
        case "quiet":
            for name in names:
                print(name)


def resolved(chosen: str) -> str:
    """The format that `auto` stands for, or `chosen`."""
    if chosen != "auto":
        return chosen
    return "human" if sys.stdout.isatty() else "json"


def say(args: Namespace, text: str) -> None:
    """Words for the person at the terminal; none where they asked for quiet."""
    if args.format != "quiet":
        complain(text)


def complain(text: str) -> None:
    """Words that are never left out."""
    print(f"lora-plugin: {human.printable(text)}", file=sys.stderr)


def refusal(detail: str, fields: Mapping[str, Any]) -> None:
    """A refusal: its words, its code, and what to do."""
    complain(f"{detail} [{fields.get('code', 'unknown')}]")
    for key in ("expected", "found", "hint"):
        if fields.get(key):
            complain(f"{key}: {fields[key]}")


def wrong_usage(args: Namespace, text: str) -> NoReturn:
    """Ends the command with its usage and exit code 2."""
    parser: ArgumentParser = args.parser
    parser.error(text)


def confirm(args: Namespace, question: str) -> None:
    """Asks, unless `--yes` was given; without anyone to ask it is wrong usage. Raises Declined."""
    if args.yes:
        return
    if not sys.stdin.isatty():
        wrong_usage(args, "nobody can be asked here: --yes says that it is meant")
    print(f"lora-plugin: {human.printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Declined
