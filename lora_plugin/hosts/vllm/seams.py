"""Patches as records: each says what it replaces, what it expects to find there, and why.

All are applied or none: every target is looked up and compared before the first is replaced.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lora_plugin.errors import Code, HostIncompatible

_MARK = "__lora_plugin_original__"


@dataclass(frozen=True)
class Seam:
    """One name of the host that the plugin replaces.

    Attributes:
        module: the module that holds the name, the one that imports it where names are copied.
        name: the name in it, dotted for an attribute of a class.
        wrap: makes the replacement from the original.
        parameters: the parameters that the original must begin with; None for something that is not called.
        why: what would go wrong without it.
        adds: the name is the plugin's own: it must not be there.
        keeps: nothing is replaced: a subclass of the plugin's relies on it.
    """

    module: str
    name: str
    wrap: Callable[[Any], Any]
    parameters: tuple[str, ...] | None
    why: str
    adds: bool = False
    keeps: bool = False

    @property
    def target(self) -> str:
        return f"{self.module}:{self.name}"

    def misfit(self) -> str | None:
        """Why the host does not look as expected here, or None."""
        try:
            owner, leaf = self._owner()
        except (ImportError, AttributeError) as error:
            return f"{self.target}: {error}"
        # Its own: what a parent class has under the name is something else.
        present = leaf in vars(owner)
        if self.adds:
            return f"{self.target} exists already" if present else None
        if not present:
            return f"{self.target} is gone"
        if self.parameters is None:
            return None
        found = tuple(inspect.signature(getattr(owner, leaf)).parameters)
        if found[: len(self.parameters)] == self.parameters:
            return None
        return f"{self.target} takes ({', '.join(found)}), expected ({', '.join(self.parameters)}, ...)"

    def is_applied(self) -> bool:
        """Whether this process has the replacement already."""
        try:
            owner, leaf = self._owner()
        except (ImportError, AttributeError):
            return False
        return hasattr(getattr(owner, leaf, None), _MARK)

    def apply(self) -> None:
        """Put the replacement in place."""
        if self.keeps:
            return
        owner, leaf = self._owner()
        original = None if self.adds else getattr(owner, leaf)
        replacement = self.wrap(original)
        setattr(replacement, _MARK, original)
        # A plain function on a class would become a method; what was none stays none.
        static = isinstance(owner, type) and isinstance(
            inspect.getattr_static(owner, leaf, None), staticmethod | classmethod
        )
        setattr(owner, leaf, staticmethod(replacement) if static else replacement)

    def _owner(self) -> tuple[Any, str]:
        owner: Any = importlib.import_module(self.module)
        *path, leaf = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, leaf


def incompatible(found: str) -> HostIncompatible:
    """The refusal of a host in which something is not as it should be."""
    return HostIncompatible(
        Code.HOST_INCOMPATIBLE,
        "this vLLM does not look as the LoRA plugin expects",
        expected="vLLM 0.30, 0.31 or 0.32",
        found=found,
        hint="install a supported vLLM, or set LORA_PLUGIN_ENABLED=0",
    )


def check_all(seams: Iterable[Seam]) -> None:
    """Look at every seam, and change nothing.

    Raises:
        HostIncompatible: one does not fit.
    """
    misfits = [misfit for seam in seams if (misfit := seam.misfit()) is not None]
    if misfits:
        raise incompatible("; ".join(misfits))


def apply_all(seams: Iterable[Seam]) -> None:
    """Apply every seam, once per process.

    Raises:
        HostIncompatible: one does not fit; then none is applied.
    """
    todo = [seam for seam in seams if not seam.is_applied()]
    check_all(todo)
    for seam in todo:
        seam.apply()
