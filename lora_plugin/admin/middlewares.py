"""What surrounds every admin request: its id, the token, the body limit, the log line of a change."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Collection
from contextvars import ContextVar

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

REQUEST_ID = "X-Request-Id"
current_request_id: ContextVar[str] = ContextVar("lora_plugin_admin_request_id", default="unknown")

_log = logging.getLogger("lora_plugin.admin")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SAFE_METHODS = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})


@web.middleware
async def request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Takes the caller's `X-Request-Id` when it is well formed, else makes one; the response carries it."""
    given = request.headers.get(REQUEST_ID, "")
    current_request_id.set(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
    response = await handler(request)
    response.headers[REQUEST_ID] = current_request_id.get()
    return response


@web.middleware
async def log_changes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """One line for each attempted change; reads are not logged."""
    response = await handler(request)
    if request.method not in _SAFE_METHODS:
        # The raw path: still percent-encoded, so that a name cannot forge a line of the log.
        _log.info(
            "admin: %s %s -> %d (from %s, request %s)",
            request.method,
            request.raw_path,
            response.status,
            request.remote,
            current_request_id.get(),
        )
    return response


@web.middleware
async def limit_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reads the body, so that one beyond the application's limit is refused (413) on every route."""
    if request.can_read_body:
        await request.read()
    return await handler(request)


def bearer(token: str, public: Collection[str]) -> Middleware:
    """Asks for `Authorization: Bearer <token>` on every path that is not in `public`."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(hdrs.AUTHORIZATION, "").encode("utf-8", "surrogateescape")
        if request.path not in public and not hmac.compare_digest(given, expected):
            raise web.HTTPUnauthorized(
                reason="A valid token is needed", headers={hdrs.WWW_AUTHENTICATE: "Bearer"}
            )
        return await handler(request)

    return authenticate
