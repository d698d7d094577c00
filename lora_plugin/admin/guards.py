"""What a request must pass before its handler: the names it may come by, its token, its body."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
from collections.abc import Collection
from contextvars import ContextVar
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from lora_plugin.admin.callers import Caller, GuessLimit, Tokens

SAFE_METHODS = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})
current_caller: ContextVar[Caller | None] = ContextVar("lora_plugin_admin_caller", default=None)
BODY_SECONDS = 10.0

_log = logging.getLogger("lora_plugin.admin")


def known_hosts(allowed: Collection[str]) -> Middleware:
    """Refuses names that are not the endpoint's: a web page whose name was rebound to this address has
    such a one, and so has one that sends a form here.

    IP addresses and localhost are fine: no web page can choose them as its own name.
    """
    names = {name.lower() for name in allowed} | {"localhost"}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get(hdrs.HOST, "")
        if not _is_known(host, names):
            raise web.HTTPForbidden(
                reason="The Host header is not a name of this endpoint: see LORA_PLUGIN_ADMIN_ALLOWED_HOSTS"
            )
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise web.HTTPForbidden(reason="A web page of another origin may not call this endpoint")
        return await handler(request)

    return check


def authenticate(tokens: Tokens, public: Collection[str], limit: GuessLimit) -> Middleware:
    """Asks for a token on every path that is not in `public`, and for the admin one for changes."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in public:
            caller = _caller(request, tokens, limit)
            current_caller.set(caller)
            if caller is Caller.READ and request.method not in SAFE_METHODS:
                raise web.HTTPForbidden(reason="The read-only token may not change anything")
        return await handler(request)

    return check


@web.middleware
async def limit_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reads the body, so that one beyond the limit (413) or too slow (408) is refused everywhere."""
    if request.can_read_body:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason="The body did not arrive in time") from None
    return await handler(request)


def _caller(request: web.Request, tokens: Tokens, limit: GuessLimit) -> Caller:
    header, peer = request.headers.get(hdrs.AUTHORIZATION, ""), request.remote or ""
    if tokens.admin is not None and header and (wait := limit.wait(peer)) > 0:
        seconds = str(math.ceil(wait))
        raise web.HTTPTooManyRequests(
            reason="Too many wrong tokens came from this address", headers={hdrs.RETRY_AFTER: seconds}
        )
    caller = tokens.caller(header)
    if caller is not None:
        return caller
    if header:
        limit.wrong(peer)
        _log.warning("admin: a wrong token from %s", peer)
    raise web.HTTPUnauthorized(reason="A valid token is needed", headers={hdrs.WWW_AUTHENTICATE: "Bearer"})


def _is_known(host: str, names: Collection[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
