"""The page at the admin root: three files without a build step, which hold nothing about the server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from aiohttp import web

_HEADERS = {
    # Nothing from elsewhere is loaded or sent to, and no other page may frame it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def file(name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """The handler that answers with one of the files."""
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")

    async def respond(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type=content_type, headers=_HEADERS)

    return respond
