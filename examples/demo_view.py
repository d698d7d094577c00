"""What the demo prints: steps, answers and the admin list, on a terminal or into a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLOURS = ("cyan", "green", "magenta", "yellow", "blue")
NARROW = 100  # columns; a terminal may have fewer, a file has no width of its own
QUIET_REPORT_SECONDS = 15


class View:
    """Writes to one console; colours and movement only where that console is a terminal."""

    def __init__(self) -> None:
        terminal = Console(highlight=False)
        self.console = terminal if terminal.is_terminal else Console(highlight=False, width=NARROW)

    def step(self, title: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{escape(title)}", align="left", style="dim")

    def say(self, text: str) -> None:
        """`text` may hold rich markup."""
        self.console.print(text)

    def done(self, text: str) -> None:
        self.console.print(f"[green]ok[/] {text}")

    def failed(self, text: str) -> None:
        self.console.print(f"\n[bold red]failed[/] {escape(text)}", soft_wrap=True)

    def plain(self, text: str) -> None:
        """Text that is not to be wrapped or read as markup: logs and command lines."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, text: str) -> Iterator[Callable[[float, str], None]]:
        """A spinner with seconds and a detail; in a file one line now and then."""
        with self.console.status(text) as status:
            said = 0.0

            def report(seconds: float, detail: str) -> None:
                nonlocal said
                if self.console.is_terminal:
                    short = escape(detail[: max(self.console.width - len(text) - 12, 10)])
                    status.update(f"{text} {seconds:3.0f} s [dim]{short}")
                elif seconds - said >= QUIET_REPORT_SECONDS:
                    said = seconds
                    self.plain(f"{text} {seconds:.0f} s {detail}")

            yield report

    def answers(self, answers: Mapping[str, str]) -> None:
        """One row for each model, in its colour."""
        table = Table("model", "answer", expand=True)
        for (model, answer), colour in zip(answers.items(), COLOURS, strict=False):
            table.add_row(f"[bold {colour}]{escape(model)}", f"[{colour}]{escape(answer)}")
        self.console.print(table)

    def adapters(self, adapters: Sequence[Mapping[str, Any]]) -> None:
        """The admin list: one row for each adapter."""
        if not adapters:
            self.console.print("[dim]no adapters")
            return
        table = Table("adapter", "state", "version", "rank", "targets", "size", "where", expand=True)
        for adapter in adapters:
            table.add_row(*(escape(cell) for cell in _cells(adapter)))
        self.console.print(table)

    def error(self, status: int, body: object) -> None:
        """An HTTP error as the client gets it."""
        self.console.print(f"[yellow]HTTP {status}[/]")
        self.plain(json.dumps(body, indent=2))


def _cells(adapter: Mapping[str, Any]) -> Iterator[str]:
    residency = adapter["residency"]
    yield adapter["name"]
    yield adapter["state"]
    yield (adapter["version"] or "-")[:8]
    yield str(adapter["rank"])
    yield ", ".join(adapter["targets"])
    yield f"{adapter['nbytes'] / 1e6:.1f} MB"
    yield ", ".join(tier for tier in ("disk", "host", "device") if residency[tier])
