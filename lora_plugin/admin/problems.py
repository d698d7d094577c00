"""Errors as RFC 9457 problem details, with the stable code of the error family."""

from __future__ import annotations

import logging
from http import HTTPStatus

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, ConfigDict

from lora_plugin.admin.middlewares import current_request_id
from lora_plugin.errors import Code, LoraPluginError, Reason

CONTENT_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 1

_log = logging.getLogger("lora_plugin.admin")
_CODES = {
    HTTPStatus.UNAUTHORIZED: Code.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN: Code.FORBIDDEN,
    HTTPStatus.TOO_MANY_REQUESTS: Code.TOO_MANY_REQUESTS,
    HTTPStatus.NOT_FOUND: Code.ROUTE_UNKNOWN,
    HTTPStatus.METHOD_NOT_ALLOWED: Code.METHOD_NOT_ALLOWED,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: Code.BODY_TOO_LARGE,
}
_HINTS = {
    Code.UNAUTHORIZED: "send 'Authorization: Bearer <token>' with the server's LORA_PLUGIN_ADMIN_TOKEN, "
    "which the command lora-plugin takes from that variable",
    Code.TOO_MANY_REQUESTS: "wait for the seconds that Retry-After says",
    Code.ROUTE_UNKNOWN: "GET /v1 lists the routes",
}


class Problem(BaseModel):
    """One problem document; fields that are null are left out of the body."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: Code
    expected: str | None = None
    found: str | None = None
    hint: str | None = None


def problem(request: web.Request, status: int, reason: Reason) -> web.Response:
    """The response for `reason`: type and title follow from the code alone."""
    body = Problem(
        type=f"urn:lora-plugin:error:{reason.code}",
        title=reason.code.replace("-", " ").capitalize(),
        status=status,
        detail=reason.message,
        instance=request.path,
        code=reason.code,
        expected=reason.expected,
        found=reason.found,
        hint=reason.hint,
    )
    response = web.Response(
        status=status, text=body.model_dump_json(exclude_none=True), content_type=CONTENT_TYPE
    )
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        response.headers[hdrs.RETRY_AFTER] = str(RETRY_AFTER_SECONDS)
    return response


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns everything that is raised further in into a problem document."""
    try:
        return await handler(request)
    except LoraPluginError as error:
        return problem(request, error.status, error.reason)
    except web.HTTPException as error:
        if error.status < HTTPStatus.BAD_REQUEST:
            raise
        return _http_problem(request, error)
    except Exception:
        _log.exception("admin: %s %s failed", request.method, request.raw_path)
        hint = f"the server's log has the cause, request id {current_request_id.get()}"
        return problem(request, 500, Reason(Code.INTERNAL, "The operation failed unexpectedly", hint=hint))


def _http_problem(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals; the headers that belong to the status are kept."""
    fallback = Code.BAD_REQUEST if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else Code.INTERNAL
    code = _CODES.get(HTTPStatus(error.status), fallback)
    allow = error.headers.get(hdrs.ALLOW)
    response = problem(
        request, error.status, Reason(code, error.reason, expected=allow, hint=_HINTS.get(code))
    )
    for header in (hdrs.ALLOW, hdrs.WWW_AUTHENTICATE, hdrs.RETRY_AFTER):
        if header in error.headers:
            response.headers[header] = error.headers[header]
    return response
