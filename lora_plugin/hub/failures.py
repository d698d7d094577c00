"""What the Hub's client raises, as errors of the family: is it worth another try, and what to tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# The transport's own base class, which the client takes from httpx or httpx2.
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # isort: skip

from lora_plugin.errors import AdapterRejected, Code, LoraPluginError, Unavailable
from lora_plugin.hub.reference import HubReference

_ACCESS = "set HF_TOKEN, or correct it; for a gated repository accept its conditions with that account"


@contextmanager
def family(reference: HubReference) -> Iterator[None]:
    """Turns what the client raises into a family error.

    Raises:
        AdapterRejected: HUB_NOT_FOUND or HUB_FORBIDDEN: the same will be answered again.
        Unavailable: HUB_UNREACHABLE: it may work later. FETCH_FAILED: the files could not be kept.
    """
    try:
        yield
    except LoraPluginError:
        raise
    except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise _of(reference, error) from error
    except OSError as error:
        # The client checks what it wrote against the announced size, and raises this for a shortfall too.
        raise Unavailable(
            Code.FETCH_FAILED, f"{reference} could not be written down", found=error.strerror or "wrong size"
        ) from error
    except Exception as error:
        raise _unreachable(f"the answer about {reference} cannot be read", type(error).__name__) from error


def _of(reference: HubReference, error: Exception) -> LoraPluginError:
    match error:
        case GatedRepoError():
            return _forbidden(f"{reference.repo} is gated")
        case RepositoryNotFoundError():
            return _not_found(f"{reference.repo} is not on the Hub, or not for this token", _ACCESS)
        case RevisionNotFoundError():
            return _not_found(f"{reference.repo} has no revision {reference.revision!r}")
        case RemoteEntryNotFoundError():
            return _not_found(f"a file of {reference} went away while it was fetched")
        case HfHubHTTPError():
            return _of_status(reference, error.response.status_code)
        case LocalEntryNotFoundError() if isinstance(error.__cause__, HTTPError):
            return _of(reference, error.__cause__)
    if constants.HF_HUB_OFFLINE:
        return _unreachable(f"{reference} is not in the local cache", "HF_HUB_OFFLINE is set")
    return _unreachable(f"{reference} cannot be fetched now", type(error).__name__)


def _of_status(reference: HubReference, status: int) -> LoraPluginError:
    if status in (401, 403):
        return _forbidden(f"the Hub refuses {reference.repo}")
    return _unreachable(f"{reference} cannot be fetched now", f"status {status}")


def _forbidden(message: str) -> AdapterRejected:
    return AdapterRejected(Code.HUB_FORBIDDEN, message, hint=_ACCESS)


def _not_found(message: str, hint: str | None = None) -> AdapterRejected:
    return AdapterRejected(Code.HUB_NOT_FOUND, message, hint=hint)


def _unreachable(message: str, found: str) -> Unavailable:
    return Unavailable(Code.HUB_UNREACHABLE, message, found=found, hint="it is tried again by itself")
