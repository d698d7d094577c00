"""What the commands print for people; every function returns text without a trailing newline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Sequence[str]


def adapters(views: Iterable[Mapping[str, Any]]) -> str:
    """One line per adapter."""
    head = ("NAME", "STATE", "RANK", "VERSION", "HOST", "DEVICE", "PINNED", "REQUESTS", "REASON")
    return table(head, [_adapter_row(view) for view in views])


def adapter(view: Mapping[str, Any]) -> str:
    """Every field of one adapter, a line each."""
    residency = view["residency"]
    tiers = f"host {_held(residency, 'host')}, device {_held(residency, 'device')}"
    fields = {
        "name": view["name"],
        "state": view["state"],
        **{f"reason {key}": value for key, value in (view["reason"] or {}).items()},
        "version": view["version"],
        "id": view["id"],
        "rank": view["rank"],
        "targets": ", ".join(view["targets"]),
        "size on disk": size(view["nbytes"]) if view["nbytes"] else None,
        "size packed": size(view["packed_bytes"]) if view["packed_bytes"] else None,
        "base model": view["base_model"],
        "warnings": "; ".join(view["warnings"]),
        "pinned": "yes" if view["pinned"] else "no",
        "engines": tiers,
        "requests": view["requests"],
        "last used": ago(view["last_used_seconds_ago"]),
    }
    return _fields(fields)


def verdict(facts: Mapping[str, Any]) -> str:
    """What `validate` found out about a folder; of a refused one, the reason too."""
    if not facts["servable"]:
        reason = facts["reason"]
        said = {key: reason.get(key) for key in ("expected", "found", "hint")}
        verdict = f"refused: {reason['message']} [{reason['code']}]"
        return _fields({"name": facts["name"], "verdict": verdict, **said})
    ranks = ", ".join(f"{rank} ({count} modules)" for rank, count in facts["ranks"].items())
    return _fields(
        {
            "name": facts["name"],
            "verdict": f"servable ({facts['checked']} checked)",
            "ranks": ranks,
            "targets": ", ".join(facts["targets"]),
            "layers": facts["layers"],
            "pool rows": facts["pool_rows"],
            "size on disk": size(facts["nbytes"]),
            "size packed": f"{size(facts['packed_bytes'])} ({facts['dtype']})",
            "base model": facts["base_model"],
            "warnings": "; ".join(facts["warnings"]),
        }
    )


def converted(facts: Mapping[str, Any]) -> str:
    """What `convert` wrote."""
    return f"{printable(facts['folder'])}: {facts['tensors']} tensors, {size(facts['nbytes'])}"


def pool(view: Mapping[str, Any]) -> str:
    """Each engine's numbers and its extents."""
    return "\n\n".join(_engine(index, engine) for index, engine in enumerate(view["engines"]))


def routing(view: Mapping[str, Any]) -> str:
    """One line per alias and composition, and one for each file that cannot be used."""
    head = ("NAME", "KIND", "STANDS FOR", "STICKY", "FALLBACK")
    aliases = [
        (
            each["name"],
            "alias",
            _shares(each["targets"], " ", ", "),
            each["sticky"] or "-",
            "base" if each["fallback"] else "-",
        )
        for each in view["aliases"]
    ]
    mixed = [
        (each["name"], "composition", _shares(each["parts"], "*", "+"), "-", "-")
        for each in view["compositions"]
    ]
    wrong = [printable(reason(file["reason"])) for file in view["files"] if file["reason"]]
    return "\n".join([table(head, [*aliases, *mixed]), *wrong])


def settings(rows: Iterable[Mapping[str, str]]) -> str:
    """One line per setting."""
    return table(
        ("VARIABLE", "VALUE", "FROM"), [(row["variable"], row["value"], row["source"]) for row in rows]
    )


def event(data: Mapping[str, Any]) -> str:
    """One line for one event."""
    if data["kind"] == "reset":
        return "-- some events are missing --"
    clock = time.strftime("%H:%M:%S", time.localtime(data["time"]))
    version = f" {data['version'][:12]}" if data.get("version") else ""
    reason = data.get("reason")
    why = f": {reason['message']} [{reason['code']}]" if reason else ""
    return printable(f"{clock}  {data['kind']:<10}  {data['name']}{version}{why}")


def reason(fields: Mapping[str, str]) -> str:
    """Why something is refused, with what to do."""
    more = [f"{key} {fields[key]}" for key in ("expected", "found") if fields.get(key)]
    hint = [f"hint: {fields['hint']}"] if fields.get("hint") else []
    return "; ".join([f"{fields['message']} [{fields['code']}]", *more, *hint])


def size(nbytes: int) -> str:
    """`nbytes` in binary units, three digits at most before the unit."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def table(head: Row, rows: Iterable[Row]) -> str:
    """Columns padded to their widest cell; an empty `head` is left out."""
    lines = [tuple(map(printable, row)) for row in (head, *rows) if row]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def printable(text: str) -> str:
    """`text` on one line without control characters: parts of it may come from an adapter's files."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _shares(targets: Iterable[Mapping[str, Any]], by: str, between: str) -> str:
    """As in the files: `sql 90, sql-next@4f2a91c 10`, or `sql*0.7+polite*0.3`."""
    return between.join(f"{_target(target)}{by}{target['weight']:g}" for target in targets)


def _target(target: Mapping[str, Any]) -> str:
    version = f"@{target['version']}" if target["version"] else ""
    return f"{target['adapter'] or 'base'}{version}"


def _adapter_row(view: Mapping[str, Any]) -> Row:
    reason = view["reason"]
    return (
        view["name"],
        view["state"],
        "-" if view["rank"] is None else str(view["rank"]),
        (view["version"] or "-")[:12],
        _held(view["residency"], "host"),
        _held(view["residency"], "device"),
        "yes" if view["pinned"] else "no",
        str(view["requests"]),
        "" if reason is None else f"{reason['message']} [{reason['code']}]",
    )


def _fields(fields: Mapping[str, Any]) -> str:
    """A line for each field that has a value."""
    shown = {key: printable(str(value)) for key, value in fields.items() if value not in (None, "")}
    return table((), list(shown.items()))


def _held(residency: Mapping[str, Any], tier: str) -> str:
    return f"{residency[tier]}/{residency['engines']}"


def ago(seconds: float | None) -> str:
    """How long ago something was."""
    return "never" if seconds is None else f"{seconds:.0f} s ago"


def _engine(index: int, engine: Mapping[str, Any]) -> str:
    counters = engine["counters"]
    lines = [
        f"engine {index}: {engine['rows_free']} of {engine['rows_total']} rows free "
        f"({engine['slabs']} slabs of {engine['slab_rows']}); "
        f"host memory {size(engine['host_bytes'])} of {size(engine['host_budget_bytes'])}",
        f"loads {counters['loads']}, hits {counters['hits']}, misses {counters['misses']}, "
        f"evictions {sum(counters['evictions'].values())}",
    ]
    if engine["waiting_requests"]:
        waited = engine["longest_wait_seconds"]
        lines.append(f"{engine['waiting_requests']} requests wait for room, the oldest {waited:.1f} s")
    if engine["extents"]:
        head = ("SLAB", "ROWS", "ADAPTER", "VERSION", "PINNED", "REQUESTS")
        lines.append(table(head, [_extent_row(extent) for extent in engine["extents"]]))
    return "\n".join(lines)


def _extent_row(extent: Mapping[str, Any]) -> Row:
    first, rows = extent["first_row"], extent["rows"]
    return (
        str(extent["slab"]),
        f"{first}-{first + rows - 1}",
        extent["adapter"],
        extent["version"][:12],
        "yes" if extent["pinned"] else "no",
        str(extent["requests"]),
    )
