from __future__ import annotations

import re
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from memory_operations import DIGEST, MemoryOperations, listed
from pydantic import ValidationError

from lora_plugin.admin.models import Residency
from lora_plugin.admin.routes import ROUTES, route_definitions

DOCS = Path(__file__).parents[2] / "docs" / "admin.md"


async def test_list_shows_every_adapter_by_name(client: TestClient) -> None:
    response = await client.get("/v1/adapters")
    page = await response.json()
    assert response.status == 200
    assert response.content_type == "application/json"
    assert [view["name"] for view in page["adapters"]] == ["busy", "sql", "wide"]
    assert (page["total"], page["offset"], page["limit"]) == (3, 0, 100)


@pytest.mark.parametrize(
    ("query", "names", "total"),
    [
        ("state=rejected", ["wide"], 1),
        ("state=listed&q=SQ", ["sql"], 1),
        ("q=nothing", [], 0),
        ("limit=2", ["busy", "sql"], 3),
        ("limit=2&offset=2", ["wide"], 3),
        ("offset=3", [], 3),
    ],
)
async def test_list_filters_and_pages(client: TestClient, query: str, names: list[str], total: int) -> None:
    page = await (await client.get(f"/v1/adapters?{query}")).json()
    assert [view["name"] for view in page["adapters"]] == names
    assert page["total"] == total


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=many", "offset=-1", "sort=colour", "state=ready"]
)
async def test_list_refuses_bad_queries(client: TestClient, query: str) -> None:
    response = await client.get(f"/v1/adapters?{query}")
    problem = await response.json()
    name, value = query.split("=")
    assert (response.status, problem["code"]) == (400, "bad-request")
    assert repr(name) in problem["detail"]
    assert problem["found"] == value


async def test_adapter_view_in_full(client: TestClient) -> None:
    assert await (await client.get("/v1/adapters/sql")).json() == {
        "name": "sql",
        "state": "listed",
        "reason": None,
        "version": DIGEST,
        "id": "4611686018427387903",
        "rank": 16,
        "targets": ["q_proj", "v_proj"],
        "nbytes": 4096,
        "packed_bytes": 8192,
        "base_model": "tiny",
        "source": None,
        "warnings": [],
        "pinned": False,
        "residency": {"disk": True, "host": 2, "device": 1, "engines": 2},
        "requests": 0,
        "listed_at": 1_700_000_000.0,
        "last_used_seconds_ago": 3.5,
    }


async def test_rejected_adapter_carries_its_reason(client: TestClient) -> None:
    view = await (await client.get("/v1/adapters/wide")).json()
    assert view["state"] == "rejected"
    assert view["reason"] == {
        "code": "rank-too-large",
        "message": "The rank is above the server's maximum",
        "expected": "at most 64",
        "found": "128",
        "hint": "start the server with --max-lora-rank 128",
    }


async def test_changes_answer_with_the_view_afterwards(client: TestClient) -> None:
    evicted = await (await client.post("/v1/adapters/sql/evict")).json()
    assert evicted["residency"] == {"disk": True, "host": 0, "device": 0, "engines": 2}
    assert (await (await client.post("/v1/adapters/sql/pin")).json())["pinned"] is True
    assert (await (await client.get("/v1/adapters/sql")).json())["pinned"] is True
    assert (await (await client.post("/v1/adapters/sql/unpin")).json())["pinned"] is False
    unloaded = await client.delete("/v1/adapters/sql")
    assert (unloaded.status, (await unloaded.json())["state"]) == (200, "unloaded")


@pytest.mark.parametrize(
    ("query", "seconds"), [("", None), ("?drain=abort", 0), ("?drain=0", 0), ("?drain=2.5", 2.5)]
)
async def test_unloading_may_have_a_time_limit(
    client: TestClient, operations: MemoryOperations, query: str, seconds: float | None
) -> None:
    assert (await client.delete(f"/v1/adapters/sql{query}")).status == 200
    assert operations.drained == seconds


@pytest.mark.parametrize("drain", ["soon", "-1", "nan", "inf", "1e9", ""])
async def test_a_time_limit_is_a_number_of_seconds(
    client: TestClient, operations: MemoryOperations, drain: str
) -> None:
    refused = await client.delete(f"/v1/adapters/sql?drain={drain}")
    assert refused.status in (400, 422)
    detail = (await refused.json())["detail"]
    assert detail.startswith("The query parameter 'drain' is not accepted: Input should be 'abort'; Input ")
    assert operations.views["sql"].state == "listed"


async def test_encoded_names_reach_the_operation_whole(
    client: TestClient, operations: MemoryOperations
) -> None:
    operations.views["a/../b"] = listed("a/../b")
    assert (await (await client.get("/v1/adapters/a%2F..%2Fb")).json())["name"] == "a/../b"


async def test_pool_view_in_full(client: TestClient) -> None:
    pool = await (await client.get("/v1/pool")).json()
    assert len(pool["engines"]) == 2
    assert pool["engines"][0] == {
        "slabs": 4,
        "slab_rows": 64,
        "rows_total": 256,
        "rows_free": 240,
        "host_rows": 24,
        "host_bytes": 8192,
        "device_bytes": 4096,
        "host_budget_bytes": 1 << 20,
        "waiting_requests": 3,
        "longest_wait_seconds": 1.5,
        "extents": [
            {
                "slab": 0,
                "adapter": "sql",
                "version": DIGEST,
                "first_row": 8,
                "rows": 16,
                "pinned": False,
                "requests": 1,
            }
        ],
        "counters": {"loads": 5, "hits": 7, "misses": 2, "evictions": {"room": 2}},
    }


async def test_health_follows_the_first_scan(client: TestClient, operations: MemoryOperations) -> None:
    operations.is_ready = False
    waiting = await client.get("/health")
    assert (waiting.status, (await waiting.json())["code"]) == (503, "not-ready")
    operations.is_ready = True
    ready = await client.get("/health")
    assert (ready.status, await ready.json()) == (200, {"status": "ok"})


async def test_index_lists_the_table(client: TestClient) -> None:
    index = await (await client.get("/v1")).json()
    assert [(line["method"], line["path"]) for line in index["routes"]] == [
        (route.method, route.path) for route in ROUTES
    ]
    assert all(line["summary"] for line in index["routes"])


def test_the_router_holds_the_table_and_nothing_else() -> None:
    app = web.Application()
    app.add_routes(route_definitions())
    served = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    table = {(route.method, route.path) for route in ROUTES}
    assert served - table == {("HEAD", path) for method, path in table if method == "GET"}
    assert served >= table
    assert len({route.operation for route in ROUTES}) == len(ROUTES)


def test_every_route_is_documented() -> None:
    documented = set(re.findall(r"^\| `([A-Z]+) (/[^`]*)` \|", DOCS.read_text(), re.MULTILINE))
    assert documented == {(route.method, route.path) for route in ROUTES}


def test_views_are_immutable_and_closed() -> None:
    view = listed("sql")
    with pytest.raises(ValidationError):
        view.pinned = True
    with pytest.raises(ValidationError):
        Residency(disk=True, host=0, device=0, engines=1, tape=1)


async def test_put_says_how_the_load_stands(client: TestClient, operations: MemoryOperations) -> None:
    ready = await client.put("/v1/adapters/sql")
    assert (ready.status, "Location" in ready.headers) == (200, False)
    await client.post("/v1/adapters/sql/evict")
    loading = await client.put("/v1/adapters/sql")
    assert (loading.status, loading.headers["Location"]) == (202, "/v1/adapters/sql")
    assert (await loading.json())["residency"]["host"] == 0
    loaded = await client.put("/v1/adapters/sql?wait=5", json={})
    assert (loaded.status, loaded.headers["Location"]) == (201, "/v1/adapters/sql")
    assert (await loaded.json())["residency"]["host"] == 2
    assert (await client.put("/v1/adapters/none")).status == 404


async def test_put_from_a_source_that_is_not_allowed(client: TestClient) -> None:
    response = await client.put("/v1/adapters/new", json={"source": {"hub": "org/repo"}})
    assert (response.status, (await response.json())["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "bad-request"),
        (b"[" * 100_00, 400, "bad-request"),
        (b"\xff", 400, "bad-request"),
        (b"[]", 422, "body-invalid"),
        (b'{"path": "/etc"}', 422, "body-invalid"),
        (b'{"source": {"hub": "../x/y"}}', 422, "body-invalid"),
        (b'{"source": {"hub": "org/repo", "revision": 3}}', 422, "body-invalid"),
        (b'{"source": {"path": "/etc"}}', 422, "body-invalid"),
    ],
)
async def test_put_refuses_other_bodies(client: TestClient, body: bytes, status: int, code: str) -> None:
    response = await client.put("/v1/adapters/sql", data=body)
    assert (response.status, (await response.json())["code"]) == (status, code)


@pytest.mark.parametrize("query", ["wait=-1", "wait=301", "wait=nan", "wait=soon", "now=1", "wait=1&wait=2"])
async def test_put_refuses_bad_queries(client: TestClient, query: str) -> None:
    assert (await client.put(f"/v1/adapters/sql?{query}")).status == 400


async def test_reload_takes_back_an_unload(client: TestClient) -> None:
    await client.delete("/v1/adapters/sql")
    response = await client.post("/v1/adapters/sql/reload")
    assert (response.status, (await response.json())["state"]) == (200, "listed")


async def test_list_sorts_and_filters(client: TestClient, operations: MemoryOperations) -> None:
    operations.views["big"] = listed("big").model_copy(update={"nbytes": 9999, "last_used_seconds_ago": None})
    await client.post("/v1/adapters/sql/pin")

    async def names(query: str) -> list[str]:
        page = await (await client.get(f"/v1/adapters?{query}")).json()
        return [view["name"] for view in page["adapters"]]

    assert (await names("sort=requests"))[0] == "busy"
    assert (await names("sort=size"))[0] == "big"
    assert (await names("sort=used"))[-2:] == ["big", "wide"]
    assert await names("pinned=true") == ["sql"]
    assert await names("resident=device&pinned=false") == ["big", "busy"]


async def test_config_shows_where_a_value_came_from(client: TestClient) -> None:
    config = await (await client.get("/v1/config")).json()
    assert config["settings"][0] == {
        "variable": "LORA_PLUGIN_ADMIN_TOKEN",
        "value": "****",
        "source": "LORA_PLUGIN_ADMIN_TOKEN",
        "description": "token",
    }


async def test_openapi_describes_the_table(client: TestClient) -> None:
    document = await (await client.get("/openapi.json")).json()
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}
    references = set(re.findall(r'"#/components/schemas/(\w+)"', str(document).replace("'", '"')))
    assert references == set(document["components"]["schemas"])
    put = document["paths"]["/v1/adapters/{name}"]["put"]
    assert {"200", "201", "202", "400", "401", "403", "404", "409", "413", "422", "429", "503"} <= set(
        put["responses"]
    )
    assert put["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/LoadBody")
