"""Which folder names are adapter names."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from lora_plugin.errors import AdapterRejected, Code

RESERVED: Final = frozenset({"text", "image", "audio", "video", "input"})
"""Names of chat content parts: hosts give them a meaning of their own."""

_GRAMMAR: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TEMPORARY_SUFFIXES: Final = (
    ".tmp",
    ".temp",
    ".part",
    ".partial",
    ".incomplete",
    ".download",
    ".crdownload",
    ".filepart",
    ".swp",
    ".swx",
    ".lock",
)


def is_temporary(name: str) -> bool:
    """Whether a copying tool, an editor or a volume driver made this name, never a person.

    Dot names are Kubernetes' `..data`, rsync's `.name.XXXXXX`, Emacs' `.#name` and hidden folders.
    """
    return name.startswith((".", "#")) or name.endswith("~") or name.lower().endswith(_TEMPORARY_SUFFIXES)


def is_adapter_name(name: str) -> bool:
    """Whether a folder of this name is served: the grammar fits and the name is not a temporary one."""
    return _GRAMMAR.fullmatch(name) is not None and not is_temporary(name)


def check_name(name: str, taken: Collection[str]) -> None:
    """Raise AdapterRejected with NAME_INVALID or NAME_RESERVED if no adapter may have this name.

    Args:
        name: the folder's name.
        taken: names with another meaning already, such as the served base model's.
    """
    if not is_adapter_name(name):
        raise AdapterRejected(
            Code.NAME_INVALID,
            f"the folder's name {name[:120]!r} is not an adapter name",
            expected="a letter or digit, then up to 99 of letters, digits, '.', '_' and '-', "
            "without a temporary file's suffix",
            hint="rename the folder",
        )
    if name in RESERVED or name in taken:
        raise AdapterRejected(
            Code.NAME_RESERVED, f"the name {name!r} is taken by the server", hint="rename the folder"
        )
