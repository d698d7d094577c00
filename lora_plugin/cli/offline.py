"""The commands on adapters' folders: no server, no vLLM."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from lora_plugin.cli import human
from lora_plugin.cli.output import Said, add_format, resolved, say, show, wrong_usage
from lora_plugin.cli.remote import Fill
from lora_plugin.errors import LoraPluginError
from lora_plugin.layout import DEFAULT_MAX_RANK

_DTYPES = ("float32", "float16", "bfloat16")


def _validate(args: Namespace) -> None:
    # Imported here: no other command needs numbers or models.
    from lora_plugin.cli.validate import validate
    from lora_plugin.model_folder.layout import folder_layout
    from lora_plugin.model_folder.locate import ModelUnreadable, locate

    folder = _folder(args, args.path)
    try:
        layout = folder_layout(locate(args.model), args.dtype, args.max_lora_rank)
    except ModelUnreadable as error:
        wrong_usage(args, str(error))
    try:
        facts = validate(folder, layout, _max_bytes(), headers_only=args.headers_only)
    except LoraPluginError as error:
        show(args, {"name": folder.name, "servable": False, "reason": error.reason.to_dict()}, human.verdict)
        if resolved(args.format) == "human":
            raise Said from error
        raise
    show(args, facts, human.verdict, [folder.name])


def _convert(args: Namespace) -> None:
    from lora_plugin.adapter.convert import convert

    initial = None if args.initial is None else _folder(args, args.initial)
    try:
        done = convert(_folder(args, args.source), Path(args.target), dtype=args.dtype, initial=initial)
    except OSError as error:
        wrong_usage(args, f"{args.target}: {error.strerror or error}")
    facts = {"folder": args.target, "tensors": done.tensors, "nbytes": done.nbytes}
    say(args, "; ".join(done.changes) or "nothing had to be changed")
    show(args, facts | {"changes": list(done.changes)}, human.converted, [args.target])


def _folder(args: Namespace, given: str) -> Path:
    try:
        folder = Path(given).expanduser().absolute()
        there = folder.is_dir()
    except (OSError, RuntimeError):
        # A name that is too long, a parent that is closed, another's home that is not there.
        there = False
    if not there:
        wrong_usage(args, f"{given} is not a folder")
    return folder


def _max_bytes() -> int:
    from lora_plugin.settings import Settings, load_settings

    settings = load_settings(os.environ)
    default: Any = Settings.model_fields["max_adapter_bytes"].default
    return int(default if settings is None else settings.max_adapter_bytes)


def _fill_validate(parser: ArgumentParser) -> None:
    add_format(parser)
    parser.add_argument("path", metavar="PATH", help="the adapter's folder")
    rank = f"the server's flag ({DEFAULT_MAX_RANK})"
    model = "the base model: its folder, or a repository's id in the local Hugging Face cache"
    parser.add_argument("--model", required=True, help=model)
    parser.add_argument("--max-lora-rank", type=_rank, default=DEFAULT_MAX_RANK, metavar="N", help=rank)
    parser.add_argument("--dtype", choices=_DTYPES, help="the server's flag; default: the model's own")
    parser.add_argument("--headers-only", action="store_true", help="leave the values unread")
    parser.set_defaults(run=_validate)


def _fill_convert(parser: ArgumentParser) -> None:
    add_format(parser)
    parser.add_argument("source", metavar="SRC", help="the adapter's folder")
    parser.add_argument("target", metavar="DST", help="the folder that is made; it must not exist")
    parser.add_argument("--dtype", choices=_DTYPES, help="cast the weights")
    initial = "the adapter as it was initialised, for one relative to a changed base (PiSSA, OLoRA, CorDA)"
    parser.add_argument("--initial", metavar="FOLDER", help=initial)
    parser.set_defaults(run=_convert)


def _rank(text: str) -> int:
    rank = int(text)
    if rank < 1:
        raise ValueError
    return rank


COMMANDS: tuple[tuple[str, str, Fill], ...] = (
    ("validate", "say whether a server of a model would serve an adapter, and why not", _fill_validate),
    ("convert", "rewrite an adapter so that it can be served", _fill_convert),
)
