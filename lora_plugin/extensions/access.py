"""Whether a request may have the adapter it names, as the plugins decide."""

from __future__ import annotations

from lora_plugin.errors import AdapterNotFound, Refused
from lora_plugin.hooks import Request
from lora_plugin.hooks.manager import HookManager


def check_access(hooks: HookManager, request: Request, adapter: str) -> None:
    """Nothing, where no plugin refuses.

    Raises:
        AdapterNotFound: NOT_FOUND, for a refusal with status 404: no client can tell it from an unknown name.
        Refused: FORBIDDEN, with the refusal's status and message.
    """
    refusal = hooks.authorize(request, adapter)
    if refusal is None:
        return
    if refusal.status == 404:
        raise AdapterNotFound.named(adapter)
    raise Refused(refusal.message, refusal.status)
