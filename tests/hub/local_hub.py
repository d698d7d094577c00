"""A small Hub: the endpoints that huggingface_hub calls, with the faults of a real one."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from aiohttp import web

COMMIT = "1" * 40


@dataclass
class Repository:
    """A model repository.

    Attributes:
        files: by path, at `commit`.
        commit: what "main" and every revision that `revisions` lacks is not.
        revisions: names of the commit.
        listed: sizes that the listing claims instead of the true ones.
        gated, private: whether the Hub refuses it.
        redirect: whether files lie on another host, as LFS files do.
        name: what it is called now, if it was renamed.
    """

    files: dict[str, bytes]
    commit: str = COMMIT
    revisions: set[str] = field(default_factory=lambda: {"main"})
    listed: dict[str, int] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    redirect: bool = False
    name: str = ""


@dataclass
class LocalHub:
    """The server, on a thread.

    Attributes:
        repositories: by organisation/name.
        fail: so many of the next requests get a 503.
        stall: so many of the next downloads stop after their first bytes.
        seen: requests, by method and path.
        tokens: the authorization headers that came.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    fail: int = 0
    stall: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    tokens: set[str | None] = field(default_factory=set)
    url: str = ""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _open(self) -> None:
        app = web.Application(middlewares=[self._faults])
        app.router.add_get("/api/models/{org}/{name}/revision/{revision}", self._info)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        app.router.add_get("/cdn/{org}/{name}/{path:.+}", self._content)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _close(self) -> None:
        await self._runner.cleanup()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    @web.middleware
    async def _faults(self, request: web.Request, handler: web.Request) -> web.StreamResponse:
        self.seen[f"{request.method} {request.path}"] += 1
        self.tokens.add(request.headers.get("authorization"))
        if self.fail:
            self.fail -= 1
            return web.Response(status=503)
        return await handler(request)  # type: ignore[operator]

    def _find(self, request: web.Request) -> Repository | web.Response:
        repository = self.repositories.get(f"{request.match_info['org']}/{request.match_info['name']}")
        if repository is None or repository.private:
            return web.Response(status=404, headers={"X-Error-Code": "RepoNotFound"})
        if repository.gated:
            return web.Response(status=403, headers={"X-Error-Code": "GatedRepo"})
        revision = request.match_info.get("revision", repository.commit)
        if revision not in repository.revisions | {repository.commit}:
            return web.Response(status=404, headers={"X-Error-Code": "RevisionNotFound"})
        return repository

    async def _info(self, request: web.Request) -> web.Response:
        found = self._find(request)
        if isinstance(found, web.Response):
            return found
        siblings = [
            {"rfilename": path, "size": found.listed.get(path, len(data)), "blobId": "0" * 40}
            for path, data in found.files.items()
        ]
        name = found.name or f"{request.match_info['org']}/{request.match_info['name']}"
        return web.json_response({"id": name, "sha": found.commit, "siblings": siblings})

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        found = self._find(request)
        if isinstance(found, web.Response):
            return found
        data = found.files.get(request.match_info["path"])
        if data is None:
            return web.Response(status=404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": found.commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if found.redirect:
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": headers["ETag"]}
            _, org, name, _, _, path = request.path.split("/", 5)
            elsewhere = self.url.replace("127.0.0.1", "localhost")
            headers["Location"] = f"{elsewhere}/cdn/{org}/{name}/{path}"
            return web.Response(status=302, headers=headers)
        return await self._send(request, data, headers)

    async def _content(self, request: web.Request) -> web.StreamResponse:
        found = self._find(request)
        assert isinstance(found, Repository)
        return await self._send(request, found.files[request.match_info["path"]], {})

    async def _send(self, request: web.Request, data: bytes, headers: dict[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={**headers, "Content-Length": str(len(data))})
        await response.prepare(request)
        if request.method == "GET":
            if self.stall:
                self.stall -= 1
                await response.write(data[:10])
                await asyncio.sleep(30)
            await response.write(data)
        return response
