"""What surrounds every admin request: its id, and the audit line of a change."""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from lora_plugin.admin.guards import SAFE_METHODS, current_caller

REQUEST_ID = "X-Request-Id"
current_request_id: ContextVar[str] = ContextVar("lora_plugin_admin_request_id", default="unknown")

_log = logging.getLogger("lora_plugin.admin")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@web.middleware
async def request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Takes the caller's `X-Request-Id` when it is well formed, else makes one; the response carries it.

    No response is kept by a cache, nor taken for another type than it says: names come from files.
    """
    current_caller.set(None)
    given = request.headers.get(REQUEST_ID, "")
    current_request_id.set(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
    response = await handler(request)
    # A stream has sent its headers by now: its handler sets the id itself.
    if not response.prepared:
        response.headers[REQUEST_ID] = current_request_id.get()
        response.headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
        response.headers["X-Content-Type-Options"] = "nosniff"
    return response


@web.middleware
async def log_changes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One line for each attempted change: what, who, and how it ended; reads are not logged."""
    response = await handler(request)
    if request.method not in SAFE_METHODS:
        # The raw path: still percent-encoded, so that a name cannot forge a line of the log.
        _log.info(
            "admin: %s %s -> %d (%s, from %s, request %s)",
            request.method,
            request.raw_path,
            response.status,
            current_caller.get() or "refused",
            request.remote,
            current_request_id.get(),
        )
    return response
