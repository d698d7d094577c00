"""The certificate of the admin endpoint."""

from __future__ import annotations

import ssl
from pathlib import Path

from lora_plugin.errors import Code, SettingsError
from lora_plugin.settings import Settings


def configured(settings: Settings) -> ssl.SSLContext | None:
    """The context that the settings ask for; None where the endpoint is off or has no certificate.

    Raises:
        SettingsError: SETTINGS_INVALID when the files cannot be used.
    """
    if settings.admin_tls_cert is None or not settings.admin_port:
        return None
    return server_context(settings.admin_tls_cert, settings.admin_tls_key)


def server_context(cert: Path, key: Path | None) -> ssl.SSLContext:
    """A server's TLS context, version 1.2 at least.

    Args:
        cert: PEM file with the certificate chain.
        key: PEM file with its key; None: it is in `cert`.

    Raises:
        SettingsError: SETTINGS_INVALID when the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An empty passphrase: a key that needs one is refused instead of asked for on the terminal.
        context.load_cert_chain(cert, key, password="")
    except OSError as error:
        raise SettingsError(
            Code.SETTINGS_INVALID,
            "the admin endpoint's certificate cannot be used",
            expected="readable PEM files that belong together, the key without a passphrase",
            found=_why(error, cert, key),
            hint="correct LORA_PLUGIN_ADMIN_TLS_CERT and LORA_PLUGIN_ADMIN_TLS_KEY",
        ) from None
    return context


def _why(error: OSError, cert: Path, key: Path | None) -> str:
    """In words; a file that cannot be read is named, which the ssl module does not do."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no PEM").lower().replace("_", " ")
    for path in (cert, key or cert):
        try:
            path.open("rb").close()
        except OSError as unreadable:
            return f"{path}: {unreadable.strerror}"
    return str(error.strerror)
