"""The picture of `lora-plugin top`. Imports rich, which is an extra."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lora_plugin.cli.human import ago, printable, size

_BAR = 30
_COUNTERS = ("loads", "hits", "misses")


class Screen:
    """Remembers the counters of the picture before, to show what they have gained."""

    def __init__(self) -> None:
        self._before: list[Mapping[str, Any]] = []

    def frame(
        self, pool: Mapping[str, Any], adapters: Iterable[Mapping[str, Any]], height: int
    ) -> RenderableType:
        """One picture, no higher than `height` lines: engines above, the busiest adapters below."""
        engines = pool["engines"]
        lines = [self._engine(index, engine) for index, engine in enumerate(engines)]
        self._before = [engine["counters"] for engine in engines]
        return Group(*lines, "", _adapters(list(adapters), max(1, height - 2 * len(engines) - 4)))

    def _engine(self, index: int, engine: Mapping[str, Any]) -> Text:
        total, used = engine["rows_total"], engine["rows_total"] - engine["rows_free"]
        counters = engine["counters"]
        before = self._before[index] if index < len(self._before) else counters
        gained = ", ".join(f"{key} {counters[key]} (+{counters[key] - before[key]})" for key in _COUNTERS)
        return Text.assemble(
            (f"engine {index} ", "bold"),
            _bar(used, total),
            f" {used} of {total} rows; ",
            f"host {size(engine['host_bytes'])} of {size(engine['host_budget_bytes'])}\n",
            f"  {gained}, evictions {sum(counters['evictions'].values())}",
        )


def _adapters(views: Sequence[Mapping[str, Any]], limit: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head, justify in (("ADAPTER", "left"), ("STATE", "left"), ("RANK", "right"), ("WHERE", "left"),
                          ("PINNED", "left"), ("REQUESTS", "right"), ("LAST USED", "right")):  # fmt: skip
        table.add_column(head, justify="right" if justify == "right" else "left", no_wrap=True)
    for view in sorted(views, key=_busyness)[:limit]:
        table.add_row(*map(_cell, _row(view)))
    if len(views) > limit:
        table.caption = f"and {len(views) - limit} more"
    return table


def _cell(text: str) -> Text:
    # As Text, because a string would be read as markup.
    return Text(printable(text))


def _busyness(view: Mapping[str, Any]) -> tuple[float, float, str]:
    age = view["last_used_seconds_ago"]
    return -view["requests"], float("inf") if age is None else age, view["name"]


def _row(view: Mapping[str, Any]) -> tuple[str, ...]:
    residency = view["residency"]
    where = "device" if residency["device"] else "host" if residency["host"] else "disk"
    return (
        view["name"],
        view["state"],
        "-" if view["rank"] is None else str(view["rank"]),
        where,
        "yes" if view["pinned"] else "",
        str(view["requests"]),
        ago(view["last_used_seconds_ago"]),
    )


def _bar(used: int, total: int) -> Text:
    filled = round(_BAR * used / total) if total else 0
    return Text.assemble(("█" * filled, "green"), ("░" * (_BAR - filled), "dim"))
