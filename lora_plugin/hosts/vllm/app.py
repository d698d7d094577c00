"""The host's HTTP application, with the plugin's middleware around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lora_plugin.routing.scope import RequestScopes


def add_middleware(original: Callable[..., None]) -> Callable[..., None]:
    """Around `init_entrypoints_middleware`: a request's scope is outside of what host and operator add."""

    @functools.wraps(original)
    def function(args: Any, app: Any, *rest: Any, **kwargs: Any) -> None:
        original(args, app, *rest, **kwargs)
        app.add_middleware(RequestScopes)

    return function
