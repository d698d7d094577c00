"""A plugin that fails in every hook; in `authorize` for one adapter only, which nobody gets then."""

from __future__ import annotations

from typing import Any

from lora_plugin.hooks import hookimpl, specs

NOBODYS = "gamma"


def _failing(hook: str) -> Any:
    def fail() -> None:
        raise RuntimeError(f"broken in {hook}")

    return hookimpl(fail)


for _name in (name for name in vars(specs) if hasattr(getattr(specs, name), f"{specs.PROJECT}_spec")):
    globals()[_name] = _failing(_name)


@hookimpl
def authorize(adapter: str) -> None:
    if adapter == NOBODYS:
        raise RuntimeError("broken in authorize")
