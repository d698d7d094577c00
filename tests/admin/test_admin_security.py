"""The promises of docs/security.md about the admin endpoint, each by what must not work."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from aiohttp.test_utils import TestClient, TestServer
from memory_operations import MemoryOperations, listed

from lora_plugin.admin import callers, guards
from lora_plugin.admin.app import create_app
from lora_plugin.admin.callers import Caller, GuessLimit, Tokens
from lora_plugin.admin.routes import ROUTES
from lora_plugin.admin.server import AdminServer
from lora_plugin.admin.table import Route
from lora_plugin.admin.tls import server_context
from lora_plugin.errors import SettingsError
from lora_plugin.setting_rows import setting_rows
from lora_plugin.settings import load_settings

ADMIN, READ = "admin-secret", "read-secret"
TOKENS = Tokens(ADMIN, READ)
CHANGES = [route for route in ROUTES if route.method != "GET"]
READS = [route for route in ROUTES if route.method == "GET" and route.operation != "follow_events"]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
async def locked(operations: MemoryOperations) -> AsyncIterator[TestClient]:
    app = create_app(operations, tokens=TOKENS, allowed_hosts=("lora.example",))
    async with TestClient(TestServer(app)) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation)
async def test_every_route_but_the_public_ones_asks_for_the_token(locked: TestClient, route: Route) -> None:
    path = route.path.replace("{name}", "sql")
    response = await locked.request(route.method, path)
    assert response.status == (200 if route.public else 401)
    assert route.public == (route.path in ("/health", "/", "/page.css", "/page.js"))


async def test_the_read_token_reads_and_changes_nothing(
    locked: TestClient, operations: MemoryOperations
) -> None:
    before = dict(operations.views)
    for route in READS:
        path = route.path.replace("{name}", "sql")
        assert (await locked.get(path, headers=bearer(READ))).status == 200, path
    assert CHANGES
    for route in CHANGES:
        path = route.path.replace("{name}", "sql")
        response = await locked.request(route.method, path, headers=bearer(READ))
        assert (response.status, (await response.json())["code"]) == (403, "forbidden")
    assert operations.views == before
    assert (await locked.post("/v1/adapters/sql/pin", headers=bearer(ADMIN))).status == 200


@pytest.mark.parametrize(
    ("header", "caller"),
    [
        (f"Bearer {ADMIN}", Caller.ADMIN),
        (f"bearer {ADMIN}", Caller.ADMIN),
        (f"Bearer {READ}", Caller.READ),
        ("", None),
        ("Bearer ", None),
        (f"Basic {ADMIN}", None),
        (f"Bearer {ADMIN} ", None),
        (f"Bearer {ADMIN[:-1]}", None),
        ("Bearer \udce9", None),
    ],
)
def test_whose_a_header_is(header: str, caller: Caller | None) -> None:
    assert TOKENS.caller(header) is caller
    assert Tokens().caller(header) is Caller.ANYONE


def test_an_empty_token_is_no_read_token() -> None:
    assert Tokens(ADMIN).caller("Bearer ") is None


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By structure: every comparison is hmac.compare_digest, of both tokens, whatever was given."""
    compared: list[bytes] = []

    def digest(given: bytes, expected: bytes) -> bool:
        compared.append(expected)
        return given == expected

    monkeypatch.setattr(hmac, "compare_digest", digest)
    for given in (ADMIN, READ, "x", "", "a" * 10_000):
        compared.clear()
        TOKENS.caller(f"Bearer {given}")
        assert compared == [ADMIN.encode(), READ.encode()]


async def test_guessing_is_slowed_down_for_its_address_only(locked: TestClient) -> None:
    for _ in range(10):
        assert (await locked.get("/v1/pool", headers=bearer("guess"))).status == 401
    limited = await locked.get("/v1/pool", headers=bearer(ADMIN))
    assert (limited.status, (await limited.json())["code"]) == (429, "too-many-requests")
    assert 1 <= int(limited.headers["Retry-After"]) <= 6
    # Without a token nothing is guessed, and health goes on.
    assert (await locked.get("/v1/pool")).status == 401
    assert (await locked.get("/health")).status == 200


def test_guesses_come_back_one_by_one() -> None:
    now = [100.0]
    limit = GuessLimit(lambda: now[0])
    for _ in range(10):
        assert limit.wait("192.0.2.1") == 0
        limit.wrong("192.0.2.1")
    assert limit.wait("192.0.2.1") == 6
    assert limit.wait("192.0.2.2") == 0
    now[0] += 6
    assert limit.wait("192.0.2.1") == 0
    limit.wrong("192.0.2.1")
    assert limit.wait("192.0.2.1") == 6


def test_an_ipv6_network_is_one_guesser_and_memory_is_bounded() -> None:
    limit = GuessLimit(lambda: 0.0)
    for number in range(10):
        limit.wrong(f"2001:db8::{number:x}")
    assert limit.wait("2001:db8::ffff") > 0
    assert limit.wait("2001:db8:0:1::1") == 0
    for number in range(5000):
        limit.wrong(f"10.0.{number // 250}.{number % 250}")
    assert len(limit._free_at) <= callers._MAX_PEERS


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8765", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8765", 200),
        ("10.1.2.3", 200),
        ("lora.example:8765", 200),
        ("rebound.example", 403),
        ("localhost.example", 403),
        ("127.0.0.1.example", 403),
        ("lora.example@rebound.example", 403),
        ("", 403),
        ("[", 403),
    ],
)
async def test_a_rebound_name_is_refused(locked: TestClient, host: str, status: int) -> None:
    response = await locked.get("/v1/pool", headers={**bearer(ADMIN), "Host": host})
    assert response.status == status


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://127.0.0.1"])
async def test_a_page_of_another_origin_is_refused(
    client: TestClient, operations: MemoryOperations, origin: str
) -> None:
    response = await client.post("/v1/adapters/sql/evict", headers={"Origin": origin})
    assert (response.status, (await response.json())["code"]) == (403, "forbidden")
    assert operations.views["sql"].residency.host == 2
    own = str(client.make_url("")).rstrip("/")
    assert (await client.post("/v1/adapters/sql/evict", headers={"Origin": own})).status == 200


async def test_no_cross_origin_header_is_ever_sent(client: TestClient) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for method, path in (("OPTIONS", "/v1/adapters/sql"), ("GET", "/v1/adapters"), ("GET", "/nowhere")):
        response = await client.request(method, path, headers=asked)
        assert not [name for name in response.headers if name.lower().startswith("access-control-")]
        assert response.status >= 400


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tls")
    cert, key = root / "cert.pem", root / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    )
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), *names, "-out", cert, "-keyout", key], check=True, capture_output=True, timeout=60
    )
    return cert, key


def test_with_a_certificate_it_speaks_tls_only(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    server = AdminServer(
        lambda: create_app(MemoryOperations(listed("sql"))), "127.0.0.1", 0, server_context(cert, key)
    )
    address = server.start()
    assert address is not None
    try:
        trusting = ssl.create_default_context(cafile=str(cert))
        with urlopen(f"https://localhost:{address[1]}/health", timeout=10, context=trusting) as response:
            assert json.load(response) == {"status": "ok"}
        with pytest.raises((URLError, OSError)):
            urlopen(f"http://127.0.0.1:{address[1]}/health", timeout=10)
        with pytest.raises(URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urlopen(f"https://localhost:{address[1]}/health", timeout=10)
        old = ssl.create_default_context(cafile=str(cert))
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(OSError):
            urlopen(f"https://localhost:{address[1]}/health", timeout=10, context=old)
    finally:
        server.stop()


def test_a_certificate_that_cannot_be_used_refuses_the_start(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    for broken in ((tmp_path / "none.pem", None), (cert, None), (cert, cert), (key, key)):
        with pytest.raises(SettingsError, match="LORA_PLUGIN_ADMIN_TLS_CERT"):
            server_context(*broken)
    with pytest.raises(SettingsError, match=r"none\.pem: No such file"):
        server_context(cert, tmp_path / "none.pem")
    with pytest.raises(SettingsError, match="key values mismatch"):
        server_context(cert, _other_key(tmp_path))


def _other_key(folder: Path) -> Path:
    path = folder / "other.pem"
    command = f"openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out {path}"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    return path


async def test_the_audit_line_says_who(locked: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lora_plugin.admin")
    await locked.post("/v1/adapters/sql/pin", headers=bearer(ADMIN))
    await locked.post("/v1/adapters/sql/unpin", headers=bearer(READ))
    await locked.delete("/v1/adapters/sql")
    await locked.delete("/v1/adapters/sql", headers=bearer("wr0ng"))
    audit = [line.partition(", request ")[0] for line in caplog.messages]
    assert audit == [
        "admin: POST /v1/adapters/sql/pin -> 200 (admin token, from 127.0.0.1",
        "admin: POST /v1/adapters/sql/unpin -> 403 (read token, from 127.0.0.1",
        "admin: DELETE /v1/adapters/sql -> 401 (refused, from 127.0.0.1",
        "admin: a wrong token from 127.0.0.1",
        "admin: DELETE /v1/adapters/sql -> 401 (refused, from 127.0.0.1",
    ]
    assert "wr0ng" not in caplog.text


def test_no_secret_is_shown_anywhere() -> None:
    secrets = {"LORA_PLUGIN_ADMIN_TOKEN": ADMIN, "LORA_PLUGIN_ADMIN_READ_TOKEN": READ}
    environ = {"LORA_PLUGIN_ADAPTER_DIR": "/adapters", **secrets}
    settings = load_settings(environ)
    off = setting_rows({**environ, "LORA_PLUGIN_ENABLED": "0"})
    shown = [repr(settings), str(settings), str(setting_rows(environ)), str(off)]
    for name, value in secrets.items():
        assert {row.variable: row.value for row in setting_rows(environ)}[name] == "****"
        with pytest.raises(SettingsError) as refused:
            load_settings({**environ, name: f"{value} with a blank"})
        shown += [str(refused.value), repr(refused.value.reason)]
    assert not [text for text in shown if ADMIN in text or READ in text]


async def test_a_slow_body_is_given_up(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "BODY_SECONDS", 0.05)
    forever = asyncio.Event()

    async def trickle():  # noqa: ANN202
        yield b"{"
        await forever.wait()

    response = await client.put("/v1/adapters/sql", data=trickle())
    assert (response.status, (await response.json())["code"]) == (408, "bad-request")
    forever.set()


async def test_a_name_is_never_a_path(client: TestClient, operations: MemoryOperations) -> None:
    for name in ("..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", "%00", "a%2F..%2Fsql", "."):
        assert (await client.put(f"/v1/adapters/{name}")).status == 404


async def test_no_answer_is_cached_or_sniffed(client: TestClient) -> None:
    for path in ("/", "/v1/adapters/sql", "/v1/config", "/metrics", "/nowhere"):
        headers = (await client.get(path)).headers
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
