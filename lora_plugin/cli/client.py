"""The admin endpoint over HTTP, with the standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import ProxyHandler, Request, build_opener

# Longer than the endpoint's own limit for an operation, so that its words are the ones shown.
TIMEOUT_SECONDS = 15.0
PAGE = 1000


class Refused(Exception):
    """The endpoint answered with a problem document."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(problem["detail"])
        self.problem = problem


class Unreachable(Exception):
    """No answer, or not that of an admin endpoint."""


class AdminClient:
    """The routes as methods. Each raises Refused or Unreachable and returns the decoded JSON."""

    def __init__(self, url: str, token: str | None = None, timeout: float = TIMEOUT_SECONDS) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout = timeout
        # The endpoint is near by: a proxy of the environment would only get in the way.
        self._opener = build_opener(ProxyHandler({}))

    def adapters(self, state: str | None = None, q: str | None = None) -> list[dict[str, Any]]:
        """All pages."""
        filters = {key: value for key, value in (("state", state), ("q", q)) if value is not None}
        return list(self._pages(filters))

    def adapter(self, name: str) -> dict[str, Any]:
        return self._object("GET", _path(name))

    def change(self, operation: str, name: str) -> dict[str, Any]:
        """`operation`: evict, pin or unpin."""
        return self._object("POST", f"{_path(name)}/{operation}")

    def unload(self, name: str) -> dict[str, Any]:
        return self._object("DELETE", _path(name))

    def pool(self) -> dict[str, Any]:
        return self._object("GET", "/v1/pool")

    def _pages(self, filters: dict[str, str]) -> Iterator[dict[str, Any]]:
        offset, total = 0, 1
        while offset < total:
            query = urlencode({**filters, "offset": offset, "limit": PAGE})
            page = self._object("GET", f"/v1/adapters?{query}")
            yield from page["adapters"]
            offset, total = offset + PAGE, page["total"]

    def _object(self, method: str, path: str) -> dict[str, Any]:
        request = Request(self._url + path, method=method, headers=self._headers)  # noqa: S310
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return self._decoded(response.read())
        except HTTPError as error:
            problem = self._decoded(error.read())
            if "detail" not in problem:
                raise Unreachable(
                    f"{self._url} answered {error.code}, but not as an admin endpoint"
                ) from None
            raise Refused(problem) from None
        except URLError as error:
            raise Unreachable(f"no answer from {self._url}: {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"no answer from {self._url}: {error or type(error).__name__}") from None

    def _decoded(self, body: bytes) -> dict[str, Any]:
        try:
            decoded = json.loads(body)
        except ValueError:
            decoded = None
        if not isinstance(decoded, dict):
            raise Unreachable(f"{self._url} does not answer as an admin endpoint does")
        return decoded


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"
