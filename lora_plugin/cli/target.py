"""Which admin endpoint a command talks to."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", "8765"

# A server bound to every address is reached at the loopback one.
_WILDCARDS = {"0.0.0.0": DEFAULT_HOST, "::": "::1"}  # noqa: S104


def admin_url(given: str | None, environ: Mapping[str, str]) -> str:
    """The endpoint's URL: `given`, or where the server of this environment listens.

    Raises ValueError when there is none.
    """
    if given is not None:
        return _checked(given)
    host = environ.get("LORA_PLUGIN_ADMIN_HOST", "").strip().strip("[]") or DEFAULT_HOST
    port = environ.get("LORA_PLUGIN_ADMIN_PORT", "").strip() or DEFAULT_PORT
    if port == "0":
        raise ValueError("the admin endpoint is off (LORA_PLUGIN_ADMIN_PORT=0)")
    host = _WILDCARDS.get(host, host)
    scheme = "https" if trusted_certificate(environ) else "http"
    return _checked(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")


def admin_token(environ: Mapping[str, str]) -> str | None:
    """The bearer token of the environment, if there is one; the read-only one where it is the only one."""
    names = ("LORA_PLUGIN_ADMIN_TOKEN", "LORA_PLUGIN_ADMIN_READ_TOKEN")
    return next((token for name in names if (token := environ.get(name, "").strip())), None)


def trusted_certificate(environ: Mapping[str, str]) -> str | None:
    """The server's own certificate, which is trusted beside those that the system trusts."""
    return environ.get("LORA_PLUGIN_ADMIN_TLS_CERT", "").strip() or None


def _checked(url: str) -> str:
    parts = urlsplit(url)
    # Reading the port is what checks it.
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r} is not an http or https URL")
    return url
