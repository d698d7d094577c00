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
    "query", ["limit=0", "limit=1001", "limit=many", "offset=-1", "sort=name", "state=ready"]
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
        "host_bytes": 8192,
        "host_budget_bytes": 1 << 20,
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
    index = await (await client.get("/")).json()
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
