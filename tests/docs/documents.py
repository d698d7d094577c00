"""The documents as data: tables, links, commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def section(path: Path, title: str) -> str:
    """The text under a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", path.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{path.name} has no heading {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, without heads and rulers."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
        if not (is_ruler(line) or is_ruler(following))
    ]


def is_ruler(line: str) -> bool:
    return bool(line) and set(line) <= set("|- ")


def commands(text: str) -> Iterator[str]:
    """The shell commands of the indented blocks, continued lines joined, without comments."""
    block = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    for line in block.replace("\\\n", " ").splitlines():
        command = line.split(" # ")[0].strip()
        if command and command.isascii():
            yield " ".join(command.split())


def seam_rows() -> list[str]:
    """The table of seams, read from the source: importing it would import vLLM."""
    tree = ast.parse((ROOT / "lora_plugin/hosts/vllm/patches.py").read_text())
    names = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Seam"
    ]
    return [_seam_row(call, names) for call in sorted(calls, key=lambda call: call.lineno)]


def _seam_row(call: ast.Call, names: dict[str, str]) -> str:
    module, name, _, _, why = call.args
    texts = [names[node.id] if isinstance(node, ast.Name) else node.value for node in (module, name, why)]  # type: ignore[attr-defined]
    return f"| `{texts[0]}` | `{texts[1]}` | {texts[2]} |"
