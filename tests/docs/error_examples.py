"""An example of every error code, made by the code that raises it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_examples import NOT_WHOLE, REFUSED, Change
from adapter_samples import LIMIT, llama_layout
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

# The admin endpoint's operations and the pool's short cuts are those of their tests.
sys.path.append(str(Path(__file__).parents[1] / "admin"))
sys.path.append(str(Path(__file__).parents[1] / "catalog"))
sys.path.append(str(Path(__file__).parents[1] / "pool"))

from catalog_samples import Bench, write_adapter
from memory_operations import MemoryOperations, listed
from test_pool_decisions import admit, make, want

from lora_plugin.adapter.config import MAX_CONFIG_BYTES
from lora_plugin.adapter.folder import snapshot
from lora_plugin.adapter.load import load, verify
from lora_plugin.adapter.names import check_name
from lora_plugin.admin.app import MAX_BODY_BYTES, create_app
from lora_plugin.admin.callers import Tokens
from lora_plugin.directory import scanner
from lora_plugin.errors import Code, LoraPluginError, Reason
from lora_plugin.hooks.manager import Named
from lora_plugin.hooks.types import Selection
from lora_plugin.hosts.vllm.seams import Seam, apply_all
from lora_plugin.hub.failures import family
from lora_plugin.hub.fetches import Fetches
from lora_plugin.hub.reference import HubReference, parse_reference
from lora_plugin.routing.kept_file import KeptFile
from lora_plugin.routing.router import agreed
from lora_plugin.settings import load_settings

Maker = Callable[[Path], Reason]
REPO = HubReference(repo="acme/sql")


def raised(action: Callable[[], Any]) -> Reason:
    """The reason of the error that it raises."""
    with pytest.raises(LoraPluginError) as caught:
        action()
    return caught.value.reason


def of_folder(change: Change) -> Maker:
    def make_reason(folder: Path) -> Reason:
        change(folder)
        return raised(lambda: load(folder.parent, folder.name, LAYOUT, None, LIMIT))

    return make_reason


def of(action: Callable[[], Any]) -> Maker:
    return lambda _: raised(action)


LAYOUT = replace(llama_layout(), dtype="float16")


def row(start: str) -> Change:
    """The first example of the row of docs/adapters.md that begins so."""
    return next(all_[0] for what, all_ in {**NOT_WHOLE, **REFUSED}.items() if what.startswith(start))


def a_pipe(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


def large_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))


def changed(folder: Path) -> Reason:
    seen = snapshot(folder.parent, folder.name, LIMIT)
    (folder / "adapter_config.json").write_text("{}")
    return raised(lambda: verify(folder.parent, folder.name, seen))


def pinned() -> None:
    pool = make(a1=8)
    pool.pin(1)
    pool.evict(1)


def in_use() -> None:
    pool = make(a1=8)
    admit(pool, 1, running=(1,))
    pool.evict(1)


def full() -> None:
    pool = make(slabs=1, a1=8)
    pool.pin(1)


def not_staged() -> None:
    pool = make()
    want(pool, 1)
    pool.pin(1)


def too_large_for_the_cache() -> None:
    pool = make(budget=100)
    want(pool, 1, 200)


def clash() -> None:
    pool = make(a1=8)
    pool.want(1, "another", "f" * 64, "/adapters/another", 10)


def fails(error: Exception) -> Callable[[], None]:
    def action() -> None:
        with family(REPO):
            raise error

    return action


def of_admin(method: str, path: str, **arguments: Any) -> Maker:
    """What a request to the admin endpoint, with the token "secret", is answered."""

    async def ask() -> Reason:
        token = arguments.pop("token", "secret")
        app = create_app(arguments.pop("operations", MemoryOperations(listed("sql"))), tokens=TOKENS)
        async with TestClient(TestServer(app)) as client:
            headers = {"Authorization": f"Bearer {token}"}
            response = await client.request(method, path, headers=headers, **arguments)
            return await problem(response)

    return lambda _: asyncio.run(ask())


async def problem(response: ClientResponse) -> Reason:
    body = await response.json()
    parts = {key: body.get(key) for key in ("expected", "found", "hint")}
    return Reason(Code(body["code"]), body["detail"], **parts)


def limited(folder: Path) -> Reason:
    """The last answer to somebody who tries many tokens."""

    async def ask() -> Reason:
        async with TestClient(TestServer(create_app(MemoryOperations(), tokens=TOKENS))) as client:
            for _ in range(20):
                response = await client.get("/v1/pool", headers={"Authorization": "Bearer guess"})
            return await problem(response)

    return asyncio.run(ask())


def unloaded(folder: Path) -> Reason:
    bench = Bench(folder.parent)
    write_adapter(folder.parent / "sql")
    bench.settle()
    bench.catalog.unload("sql")
    return raised(lambda: bench.catalog.find("sql"))


def broken_aliases(folder: Path) -> Reason:
    (folder / "aliases.yaml").write_text("a: [")
    aliases = KeptFile(folder / "aliases.yaml", fail, {}, settle_seconds=0)
    aliases.look(at_once=True)
    assert aliases.reason is not None
    return aliases.reason


def fail(value: object) -> dict[str, object]:
    raise ValueError("it holds no names")


def settings() -> None:
    load_settings({"LORA_PLUGIN_ADAPTER_DIR": "/adapters", "LORA_PLUGIN_WATCH": "sometimes"})


def other_host() -> None:
    apply_all([Seam("argparse", "ArgumentParser.adapters", lambda old: old, None, "an example")])


def response(kind: type[Exception], status: int) -> Exception:
    request = httpx.Request("GET", "https://huggingface.co/api/models/acme/sql")
    return kind("an example", response=httpx.Response(status, request=request))  # type: ignore[call-arg]


TOKENS = Tokens("secret", "reader")
EXAMPLES: dict[Code, Maker] = {
    Code.NAME_INVALID: of(lambda: check_name("sql query", {"base"})),
    Code.NAME_RESERVED: of(lambda: check_name("image", {"base"})),
    Code.PATH_ESCAPE: of_folder(row("a link that leads out")),
    Code.UNREADABLE: of_folder(a_pipe),
    Code.INCOMPLETE: of_folder(row("a file shorter")),
    Code.TOO_LARGE: of_folder(large_config),
    Code.CHANGED: changed,
    Code.CONFIG_MISSING: of_folder(row("no `adapter_config.json`")),
    Code.CONFIG_INVALID: of_folder(row("a config that is not")),
    Code.PEFT_TYPE_UNSUPPORTED: of_folder(row("another `peft_type`")),
    Code.FEATURE_UNSUPPORTED: of_folder(row("relative to a changed base")),
    Code.RANK_INVALID: of_folder(row("`r` missing")),
    Code.ALPHA_INVALID: of_folder(row("`lora_alpha` missing")),
    Code.RANK_MISMATCH: of_folder(row("`r` that is not")),
    Code.RANK_TOO_LARGE: of_folder(row("a rank above")),
    Code.WEIGHTS_MISSING: of_folder(row("no weights")),
    Code.WEIGHTS_FORMAT: of_folder(row("pickled weights")),
    Code.WEIGHTS_INVALID: of_folder(row("a Git LFS pointer")),
    Code.TENSOR_UNKNOWN: of_folder(row("tensors that the model")),
    Code.TENSOR_PAIR_MISSING: of_folder(row("`lora_A` without")),
    Code.SHAPE_MISMATCH: of_folder(row("dimensions that")),
    Code.DTYPE_UNSUPPORTED: of_folder(row("int8, float8")),
    Code.NOT_FINITE: of_folder(row("NaN, infinity")),
    Code.HUB_REFERENCE_INVALID: of(lambda: parse_reference(b"repo: sql")),
    Code.HUB_NOT_ALLOWED: of(lambda: REPO.check_allowed({"other/*"})),
    Code.HUB_NOT_FOUND: of(fails(response(RepositoryNotFoundError, 404))),
    Code.HUB_FORBIDDEN: of(fails(response(GatedRepoError, 403))),
    Code.HUB_UNREACHABLE: of(fails(response(HfHubHTTPError, 503))),
    Code.FETCHING: of(lambda: Fetches(lambda *_: None, lambda: 0.0).ask("sql", REPO)),
    Code.FETCH_FAILED: of(fails(OSError(28, "No space left on device"))),
    Code.NOT_FOUND: lambda folder: raised(lambda: Bench(folder).catalog.find("sqll")),
    Code.NAME_CONFLICT: of(
        lambda: agreed([Named("model-name", Selection("sql")), Named("header", Selection("poet"))])
    ),
    Code.ROUTING_INVALID: broken_aliases,
    Code.NOT_READY: of(not_staged),
    Code.UNLOADED: unloaded,
    Code.IN_USE: of(in_use),
    Code.PINNED: of(pinned),
    Code.POOL_FULL: of(full),
    Code.HOST_CACHE_FULL: of(too_large_for_the_cache),
    Code.ID_CLASH: of(clash),
    Code.BAD_REQUEST: of_admin("GET", "/v1/adapters?colour=red"),
    Code.BODY_INVALID: of_admin("PUT", "/v1/adapters/sql", json={"path": "/etc"}),
    Code.UNAUTHORIZED: of_admin("GET", "/v1/pool", token="wrong"),
    Code.FORBIDDEN: of_admin("DELETE", "/v1/adapters/sql", token="reader"),
    Code.TOO_MANY_REQUESTS: limited,
    Code.ROUTE_UNKNOWN: of_admin("GET", "/v2/adapters"),
    Code.METHOD_NOT_ALLOWED: of_admin("PUT", "/v1/pool"),
    Code.BODY_TOO_LARGE: of_admin("POST", "/v1/adapters/sql/pin", data=b"x" * (MAX_BODY_BYTES + 1)),
    Code.INTERNAL: lambda _: scanner._unexpected("sql", MemoryError()).reason,
    Code.SETTINGS_INVALID: of(settings),
    Code.HOST_INCOMPATIBLE: of(other_host),
}
