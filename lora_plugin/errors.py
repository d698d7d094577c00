"""The error family: every failure that a person can meet has a stable code.

An error says what was expected, what was found and what to do. `Reason` is the part that is stored,
sent between processes and shown: the log, the admin API, `/v1/models` clients and the metrics label all
print the same one. Reasons name files relative to the adapter's folder, never by absolute path.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Code(StrEnum):
    """Stable codes; a code is never renamed or given another meaning."""

    # The folder
    NAME_INVALID = "name-invalid"
    NAME_RESERVED = "name-reserved"
    PATH_ESCAPE = "path-escape"
    UNREADABLE = "unreadable"
    INCOMPLETE = "incomplete"
    TOO_LARGE = "too-large"
    CHANGED = "changed-while-reading"
    # The config
    CONFIG_MISSING = "config-missing"
    CONFIG_INVALID = "config-invalid"
    PEFT_TYPE_UNSUPPORTED = "peft-type-unsupported"
    FEATURE_UNSUPPORTED = "feature-unsupported"
    RANK_INVALID = "rank-invalid"
    ALPHA_INVALID = "alpha-invalid"
    RANK_MISMATCH = "rank-mismatch"
    RANK_TOO_LARGE = "rank-too-large"
    # The weights
    WEIGHTS_MISSING = "weights-missing"
    WEIGHTS_FORMAT = "weights-format"
    WEIGHTS_INVALID = "weights-invalid"
    TENSOR_UNKNOWN = "tensor-unknown"
    TENSOR_PAIR_MISSING = "tensor-pair-missing"
    SHAPE_MISMATCH = "shape-mismatch"
    DTYPE_UNSUPPORTED = "dtype-unsupported"
    NOT_FINITE = "not-finite"
    # The Hub
    HUB_REFERENCE_INVALID = "hub-reference-invalid"
    HUB_NOT_ALLOWED = "hub-not-allowed"
    HUB_NOT_FOUND = "hub-not-found"
    HUB_FORBIDDEN = "hub-forbidden"
    HUB_UNREACHABLE = "hub-unreachable"
    FETCHING = "fetching"
    FETCH_FAILED = "fetch-failed"
    # Requests and operations
    NOT_FOUND = "not-found"
    NAME_CONFLICT = "name-conflict"
    ROUTING_INVALID = "routing-invalid"
    NOT_READY = "not-ready"
    UNLOADED = "unloaded"
    IN_USE = "in-use"
    PINNED = "pinned"
    POOL_FULL = "pool-full"
    HOST_CACHE_FULL = "host-cache-full"
    ID_CLASH = "id-clash"
    BAD_REQUEST = "bad-request"
    BODY_INVALID = "body-invalid"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    TOO_MANY_REQUESTS = "too-many-requests"
    ROUTE_UNKNOWN = "route-unknown"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    BODY_TOO_LARGE = "body-too-large"
    INTERNAL = "internal"
    # The start
    SETTINGS_INVALID = "settings-invalid"
    HOST_INCOMPATIBLE = "host-incompatible"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something was refused, in a form that can be stored and sent.

    Attributes:
        code: the stable code.
        message: one sentence, without a trailing dot, that names the field, tensor or file.
        expected: what would have been right, if that can be said.
        found: what is there instead.
        hint: what to do about it.
    """

    code: Code
    message: str
    expected: str | None = None
    found: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.message} [{self.code}]"]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.hint is not None:
            parts.append(f"hint: {self.hint}")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, str]:
        """The fields that are set, as plain strings."""
        return {key: str(value) for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Reason:
        """The inverse of `to_dict`; raises ValueError on an unknown code."""
        return cls(**{**data, "code": Code(data["code"])})


def unexpected(error: Exception) -> Reason:
    """Why an adapter whose reading failed in a way that nobody thought of is refused."""
    return Reason(Code.INTERNAL, "the adapter could not be read", found=f"{type(error).__name__}: {error}")


class LoraPluginError(Exception):
    """Base of the family. `status` is the HTTP status that fits when it reaches a client."""

    status: int = 500

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.reason = Reason(code, message, expected, found, hint)
        super().__init__(str(self.reason))

    @property
    def code(self) -> Code:
        return self.reason.code

    @classmethod
    def of(cls, reason: Reason) -> LoraPluginError:
        """The error of this class for a stored reason."""
        return cls(
            reason.code, reason.message, expected=reason.expected, found=reason.found, hint=reason.hint
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self).of, (self.reason,))


class AdapterRejected(LoraPluginError, ValueError):
    """The folder's content cannot be served; the same content will be refused again."""

    status = 400


class AdapterIncomplete(LoraPluginError, ValueError):
    """The folder is not whole yet: a copy in progress, or a broken one. Looked at again on change."""

    status = 503


_NO_PATH = "an adapter has the name of its folder in the watched directory; a path is none"


class AdapterNotFound(LoraPluginError, LookupError):
    """No adapter is served under the name."""

    status = 404

    @classmethod
    def named(cls, name: str) -> AdapterNotFound:
        """Of a name that nobody has, or that the client is not to know of: in the same words."""
        # Slashes are taken for a Hub repository's, and shown as in the name that it would have.
        hint = _NO_PATH if "/" in name or "--" in name else None
        return cls(Code.NOT_FOUND, f"no adapter is named {name[:100]!r}", hint=hint)


class AdapterBusy(LoraPluginError):
    """The operation does not fit the adapter's present state (in use, pinned)."""

    status = 409


class Unavailable(LoraPluginError):
    """It may work later: no room at the moment, or not loaded in time."""

    status = 503


class BadRequest(LoraPluginError, ValueError):
    """The request itself is wrong."""

    status = 400


class Refused(LoraPluginError):
    """A plugin's access control does not let the request have the adapter; with a status of its choice."""

    status = 403

    def __init__(self, message: str, status: int) -> None:
        super().__init__(Code.FORBIDDEN, message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.reason.message, self.status))


class BodyInvalid(BadRequest):
    """The request's body is JSON, but not what the route takes."""

    status = 422


class Forbidden(LoraPluginError):
    """The server was not set up to do this for anyone, or not for this caller."""

    status = 403


class SettingsError(LoraPluginError, ValueError):
    """Unknown, malformed or contradictory settings: the start is refused."""


class HostIncompatible(LoraPluginError, RuntimeError):
    """The serving engine does not look as this version of the plugin expects."""
