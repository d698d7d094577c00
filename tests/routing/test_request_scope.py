"""The scope of a request: seen by its tasks, ended with its response, and never in the way of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lora_plugin.readiness.staging import StageSpec
from lora_plugin.routing.scope import Chosen, RequestScopes, begin_choice, current_request

SPEC = StageSpec(1 << 21, "sql", "0123456789abcdef" * 4, "/adapters/sql", 100)
HTTP = {"type": "http", "path": "/v1/completions", "headers": [(b"X-Who", b"me"), (b"x-who", b"\xe9")]}


async def serve(app: Any, scope: dict[str, Any] = HTTP) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> Any:
        raise AssertionError

    await RequestScopes(app)(dict(scope), receive, send)
    return sent


def answering(choose: Callable[[], Chosen | None]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def handler() -> None:
            await asyncio.sleep(0)
            current_request().chosen = choose()

        # As the host does: the handler runs in a task of its own.
        await asyncio.create_task(handler())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


@pytest.mark.parametrize(
    ("chosen", "added"),
    [
        (Chosen(SPEC), [(b"x-lora-adapter", b"sql@0123456789ab")]),
        (Chosen(None), [(b"x-lora-adapter", b"base")]),
        (None, []),
    ],
)
def test_the_response_names_what_a_task_of_the_request_chose(chosen: Any, added: list[Any]) -> None:
    start, _ = asyncio.run(serve(answering(lambda: chosen)))
    assert start["headers"] == [(b"a", b"b"), *added]


def test_headers_and_path_are_those_of_the_request() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((current_request().path, current_request().headers))

    asyncio.run(serve(app))
    assert seen == [("/v1/completions", {"x-who": "me, é"})]


def test_requests_do_not_share_a_scope() -> None:
    async def all_at_once() -> list[Any]:
        chosen = [Chosen(SPEC), Chosen(None), None]
        return await asyncio.gather(*(serve(answering(lambda c=c: c)) for c in chosen))  # type: ignore[misc]

    answers = asyncio.run(all_at_once())
    assert [len(answer[0]["headers"]) for answer in answers] == [2, 2, 1]


def test_a_stream_is_passed_on_piece_by_piece() -> None:
    log: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(3):
            log.append(f"made {i}")
            await send({"type": "http.response.body", "body": b"%d" % i, "more_body": True})

    async def send(message: Any) -> None:
        log.append(message.get("body", b"start").decode())

    async def run() -> None:
        await RequestScopes(app)(dict(HTTP), send, send)  # type: ignore[arg-type]

    asyncio.run(run())
    assert log == ["start", "made 0", "0", "made 1", "1", "made 2", "2"]


def ended_by(ending: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """What the callbacks noted, of an app that ends as given."""
    log: list[str] = []

    def broken() -> None:
        raise RuntimeError("a callback")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = current_request()
        request.on_end(lambda: log.append("first"))
        request.on_end(broken)
        request.on_end(lambda: log.append("second"))
        log.append("running")
        await ending()

    async def run() -> None:
        task = asyncio.create_task(serve(app))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    return log


def test_callbacks_run_once_however_the_request_ends() -> None:
    async def well() -> None:
        pass

    async def badly() -> None:
        raise ValueError

    async def never() -> None:
        await asyncio.sleep(60)

    for ending in (well, badly, never):
        assert ended_by(ending) == ["running", "first", "second"], ending.__name__


def test_a_callback_that_comes_late_runs_at_once() -> None:
    log: list[str] = []

    async def run() -> None:
        scopes: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scopes.append(current_request())

        await serve(app)
        scopes[0].on_end(lambda: log.append("late"))

    asyncio.run(run())
    assert log == ["late"]


def test_other_protocols_have_none() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert current_request().path == ""

    asyncio.run(serve(app, {"type": "lifespan"}))


def test_without_a_request_each_task_has_its_own() -> None:
    async def task(chosen: Chosen) -> Chosen | None:
        begin_choice().chosen = chosen
        await asyncio.sleep(0)
        return current_request().chosen

    async def run() -> list[Chosen | None]:
        begin_choice().chosen = None
        return await asyncio.gather(task(Chosen(SPEC)), task(Chosen(None)))

    assert asyncio.run(run()) == [Chosen(SPEC), Chosen(None)]
