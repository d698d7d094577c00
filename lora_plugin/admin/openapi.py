"""The OpenAPI 3.1 document, made from the route table and its models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lora_plugin import __version__
from lora_plugin.admin.problems import CONTENT_TYPE, Problem
from lora_plugin.admin.table import Route

_Mode = Literal["validation", "serialization"]
_REF = "#/components/schemas/{model}"
_MODES: dict[str, _Mode] = {
    "query": "validation",
    "body": "validation",
    "model": "serialization",
}


def document(routes: Iterable[Route]) -> dict[str, Any]:
    """The document for these routes."""
    routes = tuple(routes)
    schemas = _schemas(routes)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    for query in {route.query.__name__ for route in routes if route.query}:
        del schemas[query]
    return {
        "openapi": "3.1.0",
        "info": {"title": "The admin endpoint of vllm-lora-plugin", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schemas(routes: Iterable[Route]) -> dict[str, Any]:
    models: set[tuple[type[BaseModel], _Mode]] = {(Problem, "serialization")}
    models.update(pair for route in routes for pair in _models(route))
    named = sorted(models, key=lambda pair: pair[0].__name__)
    _, definitions = models_json_schema(named, ref_template=_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    # A problem leaves out what it does not have.
    schemas["Problem"]["required"] = [n for n, f in Problem.model_fields.items() if f.is_required()]
    return schemas


def _models(route: Route) -> Iterator[tuple[type[BaseModel], _Mode]]:
    for field, mode in _MODES.items():
        if (model := getattr(route, field)) is not None:
            yield model, mode


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "parameters": [*_path_parameters(route), *_query_parameters(route, schemas)],
        "responses": {str(status): _answer(route, status) for status in route.statuses}
        | {str(status): _problem(status) for status in route.problems},
        "security": [] if route.public else [{"token": []}],
    }
    if route.body is not None:
        operation["requestBody"] = {"content": {"application/json": {"schema": _ref(route.body)}}}
    return operation


def _path_parameters(route: Route) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", route.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _query_parameters(route: Route, schemas: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if route.query is None:
        return
    for name, schema in schemas[route.query.__name__].get("properties", {}).items():
        text = route.query.model_fields[name].description
        yield {"name": name, "in": "query", "description": text, "schema": schema}


def _answer(route: Route, status: int) -> dict[str, Any]:
    plain = {"type": "object" if route.content_type == "application/json" else "string"}
    schema = plain if route.model is None else _ref(route.model)
    answer: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": {route.content_type: {"schema": schema}},
    }
    if status in (HTTPStatus.CREATED, HTTPStatus.ACCEPTED):
        answer["headers"] = {"Location": {"schema": {"type": "string"}, "required": True}}
    return answer


def _problem(status: int) -> dict[str, Any]:
    return {
        "description": HTTPStatus(status).phrase,
        "content": {CONTENT_TYPE: {"schema": _ref(Problem)}},
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
