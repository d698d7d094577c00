"""A version travels through the host as a `LoRARequest` and comes out as it went in."""

from __future__ import annotations

from lora_plugin.composition import PartSource, compose, parts_of
from lora_plugin.directory.entry import Version
from lora_plugin.hosts.vllm.requests import to_lora_request, to_spec
from lora_plugin.readiness.staging import StageSpec


def test_an_adapter() -> None:
    spec = StageSpec(1 << 40, "sql", "5f" * 32, "/adapters:old/sql", 4096)
    request = to_lora_request(spec, "base")
    assert (request.lora_name, request.lora_int_id) == ("sql", 1 << 40)
    assert to_spec(request) == spec


def test_a_composition_with_its_parts() -> None:
    versions = [Version(name, name * 64, 1, 8, 100, 200) for name in "ab"]
    sources = [PartSource(f"/adapters:1/{v.name}", v.digest, 0.1 + 0.2) for v in versions]
    spec = compose("a*0.3+b*0.3", versions, sources)
    back = to_spec(to_lora_request(spec))
    assert back == spec
    assert parts_of(back.path) == tuple(sources)
    assert spec.nbytes == 400


def test_a_path_of_the_operators_own() -> None:
    request = to_lora_request(StageSpec(1 << 40, "sql", "5f" * 32, "/x", 1))
    request.lora_path = "/somewhere/else"
    assert to_spec(request) == StageSpec(1 << 40, "sql", "", "/somewhere/else", 0)
