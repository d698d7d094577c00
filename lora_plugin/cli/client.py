"""The admin endpoint over HTTP, with the standard library only."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

# Longer than the endpoint's own limit for an operation, so that its words are the ones shown.
TIMEOUT_SECONDS = 15.0
# The endpoint sends a sign of life every 15 seconds.
SILENCE_SECONDS = 45.0
PAGE = 1000


class Refused(Exception):
    """The endpoint answered with a problem document."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(problem["detail"])
        self.problem = problem


class Unreachable(Exception):
    """No answer, or not that of an admin endpoint; `hint` says what to do."""

    def __init__(
        self, message: str, hint: str = "is the server running? --admin URL names another endpoint"
    ) -> None:
        super().__init__(message)
        self.hint = hint


class AdminClient:
    """The routes as methods. Each raises Refused or Unreachable and returns the decoded JSON.

    Args:
        url: the endpoint's.
        token: sent with every request.
        certificate: a PEM file of certificates to trust beside the system's.
        timeout: seconds for an answer.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        certificate: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout = timeout
        # The endpoint is near by: a proxy of the environment would only get in the way.
        tls = [HTTPSHandler(context=_trust(certificate))] if self._url.startswith("https:") else []
        self._opener = build_opener(ProxyHandler({}), *tls)

    def adapters(self, **filters: str | None) -> list[dict[str, Any]]:
        """All pages; `filters` are the route's."""
        return list(self._pages({key: value for key, value in filters.items() if value is not None}))

    def adapter(self, name: str) -> dict[str, Any]:
        return self._object("GET", _path(name))

    def load(
        self, name: str, source: Mapping[str, str | None] | None, wait: float
    ) -> tuple[int, dict[str, Any]]:
        """The status (200, 201 or 202) and the adapter."""
        path = f"{_path(name)}?{urlencode({'wait': f'{wait:g}'})}"
        body = None if source is None else {"source": source}
        with self._open("PUT", path, body, self._timeout + wait) as response:
            return response.status, self._decoded(response.read())

    def change(self, operation: str, name: str) -> dict[str, Any]:
        """`operation`: reload, evict, pin or unpin."""
        return self._object("POST", f"{_path(name)}/{operation}")

    def unload(self, name: str, drain: str | None = None) -> dict[str, Any]:
        """`drain`: seconds that running requests have to finish, or `abort`."""
        query = "" if drain is None else f"?{urlencode({'drain': drain})}"
        return self._object("DELETE", f"{_path(name)}{query}")

    def explain(self, name: str) -> dict[str, Any]:
        return self._object("GET", f"{_path(name)}/explain")

    def routing(self) -> dict[str, Any]:
        return self._object("GET", "/v1/routing")

    def pool(self) -> dict[str, Any]:
        return self._object("GET", "/v1/pool")

    def events(self, after: str | None = None) -> Iterator[dict[str, Any] | None]:
        """What happens, each with `id` and `kind`; None for a sign of life. Ends when the server does."""
        query = "" if after is None else f"?{urlencode({'after': after})}"
        sent: dict[str, str] = {}
        with self._open("GET", f"/v1/events{query}", timeout=SILENCE_SECONDS) as response:
            for line in response:
                field, _, value = line.decode().rstrip("\r\n").partition(":")
                if line.startswith(b":"):
                    yield None
                elif field:
                    sent[field] = value.removeprefix(" ")
                elif "data" in sent:
                    yield {"id": sent["id"], "kind": sent["event"], **self._decoded(sent["data"])}
                    sent = {}

    def _pages(self, filters: dict[str, str]) -> Iterator[dict[str, Any]]:
        offset, total = 0, 1
        while offset < total:
            query = urlencode({**filters, "offset": offset, "limit": PAGE})
            page = self._object("GET", f"/v1/adapters?{query}")
            yield from page["adapters"]
            offset, total = offset + PAGE, page["total"]

    def _object(self, method: str, path: str) -> dict[str, Any]:
        with self._open(method, path) as response:
            return self._decoded(response.read())

    @contextmanager
    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> Iterator[Any]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, self._headers, method=method)  # noqa: S310
        try:
            with self._opener.open(request, timeout=timeout or self._timeout) as response:
                yield response
        except HTTPError as error:
            problem = self._decoded(error.read())
            # vLLM's own port answers with a `detail`, too.
            if not {"detail", "code"} <= problem.keys():
                raise Unreachable(
                    f"{self._url} answered {error.code}, but not as an admin endpoint (vLLM's own port?)"
                ) from None
            if error.code == HTTPStatus.TOO_MANY_REQUESTS:
                problem["hint"] = f"try again in {error.headers['Retry-After']} s"
            raise Refused(problem) from None
        except URLError as error:
            raise self._no_answer(error.reason) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None

    def _no_answer(self, why: object) -> Unreachable:
        """In the system's words, without its numbers; a wrong scheme or certificate in ours."""
        start = f"no answer from {self._url}:"
        match why:
            case ssl.SSLCertVerificationError():
                hint = (
                    "LORA_PLUGIN_ADMIN_TLS_CERT names a certificate to trust; call the server by a name in it"
                )
                return Unreachable(
                    f"{start} its certificate is not trusted: {why.verify_message.strip('.')}", hint
                )
            case ssl.SSLError():
                return Unreachable(f"{start} it does not speak https")
            case http.client.RemoteDisconnected() if self._url.startswith("http:"):
                hint = (
                    "if it speaks https, set LORA_PLUGIN_ADMIN_TLS_CERT, or name it with --admin https://..."
                )
                return Unreachable(f"{start} it closed the connection", hint)
            case OSError(strerror=str(words)):
                return Unreachable(f"{start} {words}")
        return Unreachable(f"{start} {why or type(why).__name__}")

    def _decoded(self, body: bytes | str) -> dict[str, Any]:
        try:
            decoded = json.loads(body)
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            raise Unreachable(f"{self._url} does not answer as an admin endpoint does")
        return decoded


def _trust(certificate: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if certificate is not None:
        try:
            context.load_verify_locations(certificate)
        except OSError as error:
            raise Unreachable(f"the certificate {certificate} cannot be read: {error.strerror}") from None
    return context


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"
