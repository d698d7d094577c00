"""Access control: an API key may use the adapters that match its patterns.

    export TENANTS=tenants.json        # {"sk-red": ["red-*"], "sk-all": ["*"]}
    export LORA_PLUGIN_HOOKS=tenants PYTHONPATH=examples/hooks

The file is read once; without it the server does not start. The base model is open to everyone.
"""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path

from lora_plugin.hooks import Refusal, Request, hookimpl

PATTERNS: dict[str, list[str]] = json.loads(Path(os.environ["TENANTS"]).read_text())


@hookimpl
def authorize(request: Request, adapter: str) -> Refusal | None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or key not in PATTERNS:
        return Refusal("a known API key is needed", 401)
    if not any(fnmatchcase(adapter, pattern) for pattern in PATTERNS[key]):
        # As for a name that nobody knows: other tenants' names stay theirs.
        return Refusal("no such adapter", 404)
    return None
