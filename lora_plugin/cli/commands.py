"""The command line: its parser, put together from groups of commands, and its exit codes."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from enum import IntEnum

import lora_plugin
from lora_plugin.cli import doctor, live, local, offline, remote
from lora_plugin.cli.client import Refused, Unreachable
from lora_plugin.cli.output import Declined, Said, complain, refusal, wrong_usage
from lora_plugin.errors import LoraPluginError

_EPILOG = """\
The server is asked at http://127.0.0.1:8765, or where LORA_PLUGIN_ADMIN_HOST, LORA_PLUGIN_ADMIN_PORT and
LORA_PLUGIN_ADMIN_TLS_CERT say, or --admin; the token is read from LORA_PLUGIN_ADMIN_TOKEN.
exit codes: 0 done; 1 refused, not loaded in time, a problem found; 2 wrong usage; 3 no answer from the server
"""

GROUPS = (remote, doctor, live, local, offline)


class Exit(IntEnum):
    """The exit codes."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; a usage error exits with 2 from within."""
    args = _parsed(argv)
    try:
        args.run(args)
    except Refused as error:
        refusal(error.problem["detail"], error.problem)
        return Exit.REFUSED
    except LoraPluginError as error:
        refusal(error.reason.message, error.reason.to_dict())
        return Exit.REFUSED
    except Said:
        return Exit.REFUSED
    except Declined:
        complain("nothing was done")
        return Exit.REFUSED
    except Unreachable as error:
        complain(str(error))
        complain(f"hint: {error.hint}")
        return Exit.UNREACHABLE
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        _give_up_stdout()
    return Exit.OK


def _parsed(argv: Sequence[str] | None) -> Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # The host's flags: `serve` passes them on, and no other command takes any.
    args.rest = rest
    if rest and not args.passes_on:
        wrong_usage(args, f"unrecognized arguments: {' '.join(rest)}")
    return args


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "lora-plugin",
        description="See and steer the adapters of a server.",
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lora-plugin {lora_plugin.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for group in GROUPS:
        for name, text, fill in group.COMMANDS:
            sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
            sub.set_defaults(command=name, parser=sub, root=parser, passes_on=False)
            fill(sub)
    return parser


def _give_up_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
