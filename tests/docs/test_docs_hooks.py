"""The hooks document has every hook as its spec says, and every built-in plugin."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from documents import DOCS, rows, section

from lora_plugin.extensions.loading import load_hooks
from lora_plugin.hooks import specs
from lora_plugin.hooks.manager import HookManager
from lora_plugin.settings import Settings

HOOKS = {name: hook for name, hook in vars(specs).items() if hasattr(hook, f"{specs.PROJECT}_spec")}


def process(hook: object) -> str:
    found = re.search(r"^Process: (.*)\.$", inspect.getdoc(hook) or "", re.MULTILINE)
    assert found, hook
    return found[1]


def row(name: str) -> list[str]:
    hook = HOOKS[name]
    parameters = ", ".join(inspect.signature(hook).parameters)
    asked = "first result" if getattr(hook, f"{specs.PROJECT}_spec")["firstresult"] else "all"
    answer = str(inspect.signature(hook).return_annotation).removesuffix("None").removesuffix(" | ")
    return [f"`{name}({parameters})`", process(hook), asked, f"`{answer}`" if answer else ""]


def test_the_menu_is_that_of_the_specs() -> None:
    text = (DOCS / "hooks.md").read_text()
    table = text.split("<!-- hooks -->")[1].split("<!-- end of hooks -->")[0]
    assert rows(table) == [row(name) for name in HOOKS]


def test_a_spec_says_how_it_is_asked_and_the_manager_has_its_method() -> None:
    for name, hook in HOOKS.items():
        words = r"\bFirst (result|refusal)\b" if row(name)[2] == "first result" else r"\bAll\b"
        assert re.search(words, inspect.getdoc(hook) or ""), name
        assert hasattr(HookManager, name) or hasattr(HookManager, f"{name}s"), name


def test_every_built_in_plugin_is_described(tmp_path: Path) -> None:
    hooks = load_hooks(Settings(adapter_dir=tmp_path, hub_allow="*"))
    built_in: dict[str, set[str]] = {}
    for hook in HOOKS:
        for plugin in hooks.plugins(hook):
            built_in.setdefault(plugin, set()).add(hook)
    described = {
        name: set(re.findall(r"`(\w+)`", implemented))
        for names, implemented, _ in rows(section(DOCS / "hooks.md", "Built-in plugins"))
        for name in re.findall(r"`([\w-]+)`", names)
    }
    assert described == built_in
