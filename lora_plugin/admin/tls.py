"""The certificate of the admin endpoint."""

from __future__ import annotations

import ssl
from pathlib import Path

from lora_plugin.errors import Code, SettingsError


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
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            Code.SETTINGS_INVALID,
            "the admin endpoint's certificate cannot be used",
            expected="readable PEM files that belong together, the key without a passphrase",
            found=str(error),
            hint="correct LORA_PLUGIN_ADMIN_TLS_CERT and LORA_PLUGIN_ADMIN_TLS_KEY",
        ) from None
    return context
