"""What a server of a model would say to an adapter's folder, without the server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from lora_plugin.adapter.inspection import Inspection, inspect
from lora_plugin.adapter.names import check_name
from lora_plugin.errors import AdapterRejected
from lora_plugin.layout import ModelLayout
from lora_plugin.pool.extents import round_up
from lora_plugin.pool.pool import GRANULE


def validate(folder: Path, layout: ModelLayout, max_bytes: int, *, headers_only: bool) -> dict[str, Any]:
    """What there is to say of a folder that can be served, as plain data.

    Args:
        folder: the adapter, an absolute path.
        layout: the model.
        max_bytes: a larger adapter is refused unread.
        headers_only: whether the values go unread.

    Raises:
        AdapterRejected: it cannot be served.
        AdapterIncomplete: it is not whole.
    """
    seen = inspect(folder.parent, folder.name, layout, max_bytes, trusted=True)
    if not headers_only:
        # Imported here: the headers alone do not need torch.
        from lora_plugin.adapter.load import load

        load(folder.parent, folder.name, layout, None, max_bytes, trusted=True)
    facts = {"name": folder.name, "servable": True, "reason": None}
    return facts | {"checked": "headers" if headers_only else "values"} | _facts(seen, layout)


def _facts(seen: Inspection, layout: ModelLayout) -> dict[str, Any]:
    parts = [part for layer in seen.plan.layers for part in layer.slices if part is not None]
    ranks = Counter(part.rank for part in parts)
    return {
        "rank": seen.rank,
        "ranks": {str(rank): ranks[rank] for rank in sorted(ranks)},
        "targets": list(seen.targets),
        "layers": len(seen.plan.layers),
        "nbytes": seen.nbytes,
        "packed_bytes": seen.packed_nbytes,
        "dtype": layout.dtype,
        "pool_rows": round_up(seen.plan.rows, GRANULE),
        "base_model": seen.base_model,
        "warnings": [*seen.warnings, *_name_warnings(seen.snapshot.name)],
    }


def _name_warnings(name: str) -> list[str]:
    try:
        check_name(name, ())
    except AdapterRejected as error:
        return [f"{error.reason.message}: {error.reason.hint}"]
    return []
