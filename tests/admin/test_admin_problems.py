from __future__ import annotations

import logging
from unittest.mock import ANY

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.typedefs import Handler
from memory_operations import MemoryOperations, rejected

from lora_plugin.admin.app import MAX_BODY_BYTES, create_app
from lora_plugin.admin.callers import Tokens
from lora_plugin.errors import (
    AdapterNotFound,
    AdapterRejected,
    BadRequest,
    Code,
    LoraPluginError,
    Unavailable,
)


async def test_a_problem_in_full(client: TestClient, operations: MemoryOperations) -> None:
    operations.failure = AdapterRejected(
        Code.SHAPE_MISMATCH, "lora_A does not fit", expected="[8, 64]", found="[8, 32]", hint="train it anew"
    )
    response = await client.get("/v1/adapters/sql")
    assert response.status == 400
    assert response.content_type == "application/problem+json"
    assert await response.json() == {
        "type": "urn:lora-plugin:error:shape-mismatch",
        "title": "Shape mismatch",
        "status": 400,
        "detail": "lora_A does not fit",
        "instance": "/v1/adapters/sql",
        "code": "shape-mismatch",
        "expected": "[8, 64]",
        "found": "[8, 32]",
        "hint": "train it anew",
    }


async def test_fields_without_a_value_are_left_out(client: TestClient, operations: MemoryOperations) -> None:
    operations.failure = LoraPluginError(Code.ID_CLASH, "two adapters share an id")
    problem = await (await client.get("/v1/pool")).json()
    assert set(problem) == {"type", "title", "status", "detail", "instance", "code"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AdapterNotFound(Code.NOT_FOUND, "no such adapter"), 404),
        (BadRequest(Code.BAD_REQUEST, "no"), 400),
        (LoraPluginError(Code.INTERNAL, "no"), 500),
    ],
)
async def test_status_of_the_error_class(
    client: TestClient, operations: MemoryOperations, error: LoraPluginError, status: int
) -> None:
    operations.failure = error
    response = await client.get("/v1/pool")
    problem = await response.json()
    assert (response.status, problem["status"], problem["code"]) == (status, status, error.code)


async def test_refusals_leave_the_adapter_alone(client: TestClient) -> None:
    in_use = await client.post("/v1/adapters/busy/evict")
    assert (in_use.status, (await in_use.json())["code"]) == (409, "in-use")
    await client.post("/v1/adapters/sql/pin")
    pinned = await client.post("/v1/adapters/sql/evict")
    assert (pinned.status, (await pinned.json())["code"]) == (409, "pinned")
    assert (await (await client.get("/v1/adapters/sql")).json())["residency"]["host"] == 2


async def test_unavailable_says_when_to_come_back(client: TestClient, operations: MemoryOperations) -> None:
    operations.failure = Unavailable(Code.POOL_FULL, "no room")
    response = await client.post("/v1/adapters/sql/pin")
    assert (response.status, response.headers["Retry-After"]) == (503, "1")


@pytest.mark.parametrize("path", ["/v1/adapterz", "/v1/adapters/", "/v1/adapters/a/b/c", "/metrics/x"])
async def test_unknown_paths(client: TestClient, path: str) -> None:
    response = await client.get(path)
    assert (response.status, response.content_type) == (404, "application/problem+json")
    assert await response.json() == {
        "type": "urn:lora-plugin:error:route-unknown",
        "title": "Route unknown",
        "status": 404,
        "detail": "Not Found",
        "instance": path,
        "code": "route-unknown",
        "hint": "GET /v1 lists the routes",
    }


async def test_wrong_method_names_the_right_ones(client: TestClient) -> None:
    response = await client.patch("/v1/adapters/sql")
    problem = await response.json()
    assert (response.status, problem["code"]) == (405, "method-not-allowed")
    assert set(response.headers["Allow"].split(",")) == {"GET", "HEAD", "PUT", "DELETE"}
    assert problem["expected"] == response.headers["Allow"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_beyond_the_limit(client: TestClient, operations: MemoryOperations, chunked: bool) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)

    async def chunks():  # noqa: ANN202
        yield body

    response = await client.post("/v1/adapters/sql/pin", data=chunks() if chunked else body)
    assert (response.status, (await response.json())["code"]) == (413, "body-too-large")
    assert operations.views["sql"].pinned is False


async def test_a_small_body_is_no_obstacle(client: TestClient) -> None:
    assert (await client.post("/v1/adapters/sql/pin", json={})).status == 200


async def test_unexpected_errors_stay_inside(
    client: TestClient, operations: MemoryOperations, caplog: pytest.LogCaptureFixture
) -> None:
    operations.failure = ZeroDivisionError("secret detail")
    response = await client.get("/v1/adapters", headers={"X-Request-Id": "trace-7"})
    text = await response.text()
    assert (response.status, (await response.json())["code"]) == (500, "internal")
    assert "secret" not in text
    assert "Traceback" not in text
    assert "trace-7" in text
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("given", "kept"),
    [("trace-7", True), ("a" * 128, True), ("a" * 129, False), ("two words", False), ("", False)],
)
async def test_request_ids(client: TestClient, given: str, kept: bool) -> None:
    for path in ("/health", "/nowhere"):
        response = await client.get(path, headers={"X-Request-Id": given})
        returned = response.headers["X-Request-Id"]
        assert (returned == given) is kept
        assert returned


async def test_only_changes_are_logged(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lora_plugin.admin")
    await client.get("/v1/adapters")
    await client.get("/metrics")
    assert caplog.messages == []
    await client.post("/v1/adapters/sql/pin", headers={"X-Request-Id": "r1"})
    await client.delete("/v1/adapters/none%0Aforged")
    assert caplog.messages == [
        "admin: POST /v1/adapters/sql/pin -> 200 (no token, from 127.0.0.1, request r1)",
        ANY,
    ]
    assert caplog.messages[1].startswith("admin: DELETE /v1/adapters/none%0Aforged -> 404 ")


TOKEN = "correct horse"


@pytest.fixture
async def locked(operations: MemoryOperations) -> TestClient:
    async with TestClient(TestServer(create_app(operations, tokens=Tokens(TOKEN)))) as client:
        yield client


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", f"bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "Bearer é"]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1"),
        ("GET", "/v1/adapters"),
        ("GET", "/metrics"),
        ("GET", "/nowhere"),
        ("DELETE", "/v1/adapters/sql"),
    ],
)
async def test_no_route_without_the_token(
    locked: TestClient, operations: MemoryOperations, header: str | None, method: str, path: str
) -> None:
    headers = {} if header is None else {"Authorization": header}
    response = await locked.request(method, path, headers=headers)
    assert (response.status, response.content_type) == (401, "application/problem+json")
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert (await response.json())["code"] == "unauthorized"
    assert TOKEN not in await response.text()
    assert operations.views["sql"].state == "listed"


async def test_the_token_opens_and_health_needs_none(locked: TestClient) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert (await locked.get("/v1/adapters", headers=headers)).status == 200
    assert (await locked.delete("/v1/adapters/sql", headers=headers)).status == 200
    assert (await locked.get("/health")).status == 200
    assert (await locked.get("/health/")).status == 401


async def test_given_middlewares_run_before_the_token(operations: MemoryOperations) -> None:
    @web.middleware
    async def closed(request: web.Request, handler: Handler) -> web.StreamResponse:
        raise BadRequest(Code.BAD_REQUEST, "not by this name")

    server = TestServer(create_app(operations, tokens=Tokens(TOKEN), middlewares=[closed]))
    async with server, ClientSession() as session:
        response = await session.get(server.make_url("/v1/pool"))
        assert (response.status, (await response.json())["detail"]) == (400, "not by this name")


async def test_reasons_from_files_are_data(client: TestClient, operations: MemoryOperations) -> None:
    reason = BadRequest(Code.WEIGHTS_INVALID, 'quote " and \n and \x1b[31m').reason
    operations.views["odd"] = rejected("odd", reason)
    assert (await (await client.get("/v1/adapters/odd")).json())["reason"]["message"] == reason.message
