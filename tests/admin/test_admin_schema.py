"""Requests made from the served OpenAPI document, right and wrong ones, against a real service.

Every answer must be one that the document says, of the content type and form that it says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from real_service import serving
from schemathesis.specs.openapi.checks import positive_data_acceptance

sys.path.append(str(Path(__file__).parents[1] / "catalog"))

from catalog_samples import LAYOUT, write_adapter

from lora_plugin.admin.openapi import document
from lora_plugin.admin.routes import ROUTES

TOKEN = "s3cret"
# What is right in form may be refused for what it names: a folder's content, a name, a repository.
REFUSABLE = [positive_data_acceptance]
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
NAMES = ("sql", "chat")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(root / name, seed=seed)
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{}")
    with serving(root, LAYOUT, admin_token=TOKEN) as url:
        yield url


# What `GET /openapi.json` serves. A stream does not end by itself: it has tests of its own.
api = schemathesis.openapi.from_dict(document(ROUTES)).exclude(operation_id="follow_events")


@api.parametrize()
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(case: schemathesis.Case, endpoint: str) -> None:
    case.call_and_validate(base_url=endpoint, headers=HEADERS, timeout=20, excluded_checks=REFUSABLE)


@api.parametrize()
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_known_adapters_are_answered_as_described(case: schemathesis.Case, endpoint: str) -> None:
    """Names made up are seldom an adapter's: here they are."""
    if "name" not in case.path_parameters:
        return
    for name in NAMES:
        case.path_parameters["name"] = name
        response = case.call(base_url=endpoint, headers=HEADERS, timeout=20)
        assert response.status_code < 500 or response.status_code == 503
        case.validate_response(response, excluded_checks=REFUSABLE)
