"""Putting the plugin into the host: all of it, or a clear refusal when an engine is to start."""

from __future__ import annotations

import logging
from typing import Any

from lora_plugin.errors import HostIncompatible
from lora_plugin.hosts.vllm.seams import Seam, apply_all, incompatible

logger = logging.getLogger("lora_plugin")


def install() -> None:
    """Apply every seam; if one does not fit, none, and the engine's start is refused with that."""
    _log_as_the_host()
    try:
        apply_all(seams())
    except HostIncompatible as error:
        _refuse_engine(error)


def seams() -> tuple[Seam, ...]:
    """What is replaced or relied on in the host that is installed.

    Raises:
        HostIncompatible: it lacks what the plugin imports of it.
    """
    try:
        # Not at the top: a host of another version may lack what these modules import.
        from lora_plugin.hosts.vllm.patches import SEAMS
    except (ImportError, AttributeError) as error:
        raise incompatible(str(error)) from error
    return SEAMS


class _HostHandler(logging.Handler):
    """Hands records to the host's logger as it is configured at that moment: level, format, process name."""

    def emit(self, record: logging.LogRecord) -> None:
        host = logging.getLogger("vllm")
        if host.isEnabledFor(record.levelno):
            host.handle(record)


def _log_as_the_host() -> None:
    if not any(isinstance(handler, _HostHandler) for handler in logger.handlers):
        logger.addHandler(_HostHandler())
        logger.propagate = False
        logger.setLevel(logging.DEBUG)


def _refuse_engine(error: HostIncompatible) -> None:
    """`vllm --help` and the like must go on working: the refusal comes when an engine is configured."""
    from vllm.engine.arg_utils import EngineArgs

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    EngineArgs.create_engine_config = create_engine_config
