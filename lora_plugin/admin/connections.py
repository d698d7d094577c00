"""A bound on open connections: they are file descriptors of the process that serves requests."""

from __future__ import annotations

import asyncio

from aiohttp import web

MAX_CONNECTIONS = 256


class BoundedRunner(web.AppRunner):
    """A runner whose sites close a connection at once where there are too many already."""

    @property
    def server(self) -> web.Server | None:
        made = super().server
        return made if made is None else _Bounded(made)  # type: ignore[return-value]


class _Bounded:
    """What makes the protocol of a new connection."""

    def __init__(self, server: web.Server) -> None:
        self._server = server

    def __call__(self) -> asyncio.BaseProtocol:
        full = len(self._server.connections) >= MAX_CONNECTIONS
        return _Closed() if full else self._server()


class _Closed(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
