"""A request's query string and body as models."""

from __future__ import annotations

import json
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from lora_plugin.errors import BadRequest, BodyInvalid, Code

Model = TypeVar("Model", bound=BaseModel)


def parse_query(request: web.Request, model: type[Model]) -> Model:
    """Raises BadRequest for an unknown, repeated or malformed parameter."""
    if len(request.query) != len(set(request.query)):
        raise BadRequest(Code.BAD_REQUEST, "A query parameter is given twice")
    try:
        return model.model_validate(dict(request.query))
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        name = str(first["loc"][0])
        # One that may be of several kinds has a complaint by each.
        said = [first["msg"], *(each["msg"] for each in others if each["loc"][0] == name)]
        raise BadRequest(
            Code.BAD_REQUEST,
            f"The query parameter {name!r} is not accepted: {'; '.join(said)}",
            found=str(first["input"])[:200],
            hint=f"the parameters are {', '.join(model.model_fields)}",
        ) from None


async def parse_body(request: web.Request, model: type[Model]) -> Model:
    """The body's JSON; an empty body is an empty object.

    Raises:
        BadRequest: it is not JSON.
        BodyInvalid: it does not fit.
    """
    raw = await request.read()
    try:
        content = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        raise BadRequest(Code.BAD_REQUEST, "The body is not JSON") from None
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = _place(first["loc"])
        raise BodyInvalid(
            Code.BODY_INVALID,
            f"The body is not accepted{f' at {place!r}' if place else ''}: {first['msg']}",
            hint="GET /openapi.json has its schema",
        ) from None


def _place(loc: tuple[int | str, ...]) -> str:
    return ".".join(map(str, loc))
