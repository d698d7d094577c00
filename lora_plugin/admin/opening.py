"""The admin endpoint as the settings want it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from aiohttp import web
from pydantic import SecretStr

from lora_plugin.admin.app import create_app
from lora_plugin.admin.bridge import LoopBridge
from lora_plugin.admin.callers import Tokens
from lora_plugin.admin.operations import Operations
from lora_plugin.admin.server import AdminServer
from lora_plugin.admin.tls import configured
from lora_plugin.directory.events import EventLog
from lora_plugin.metrics import Metrics
from lora_plugin.settings import Settings, is_loopback

logger = logging.getLogger("lora_plugin")


def open_admin(
    settings: Settings,
    operations: Operations,
    loop: asyncio.AbstractEventLoop,
    *,
    metrics: Metrics,
    events: EventLog,
    plugin_routes: Sequence[tuple[str, web.RouteDef]],
) -> AdminServer:
    """Starts the endpoint; `operations` run on `loop`.

    Raises SettingsError when the certificate cannot be used. A taken port is only warned of.
    """
    bridge = LoopBridge(operations, loop)
    tls = configured(settings)
    server = AdminServer(
        lambda: create_app(
            bridge,
            tokens=Tokens(_secret(settings.admin_token), _secret(settings.admin_read_token)),
            allowed_hosts=(settings.admin_host, *settings.admin_allowed_hosts),
            metrics=metrics,
            events=events,
            plugin_routes=plugin_routes,
        ),
        settings.admin_host,
        settings.admin_port,
        tls,
    )
    address = server.start()
    if address is not None:
        logger.info("admin endpoint: %s://%s:%d", "https" if tls else "http", *address)
        if not tls and not is_loopback(settings.admin_host):
            logger.warning("admin endpoint: the token travels unencrypted; see LORA_PLUGIN_ADMIN_TLS_CERT")
    return server


def _secret(token: SecretStr | None) -> str | None:
    return None if token is None else token.get_secret_value()
