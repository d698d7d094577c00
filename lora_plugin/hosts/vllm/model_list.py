"""`/v1/models`: thousands of names, written out in a few milliseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def attach_router(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Around the models' `attach_router`: the same list, in front of the host's route.

    The host turns it into objects first and those into text: with 2,000 names every stream waits for that.
    """

    @functools.wraps(original)
    def function(app: Any) -> None:
        app.router.routes.append(Route("/v1/models", _models, include_in_schema=False))
        original(app)

    return function


async def _models(request: Request) -> Response:
    models = await request.app.state.openai_serving_models.show_available_models()
    return Response(models.model_dump_json(), media_type="application/json")
