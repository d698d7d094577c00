"""How a version of an adapter travels inside the host: as a `LoRARequest`."""

from __future__ import annotations

from vllm.lora.request import LoRARequest

from lora_plugin.readiness.staging import StageSpec

_SCHEME = "lora-plugin"


def to_lora_request(spec: StageSpec, base_model: str | None = None) -> LoRARequest:
    """The host's request for a version.

    The path carries the digest: the host's prefix cache is keyed by name and path, so two versions of a name
    never share blocks.
    """
    path = f"{_SCHEME}:{spec.digest}:{spec.nbytes}:{spec.path}"
    return LoRARequest(lora_name=spec.name, lora_int_id=spec.id, lora_path=path, base_model_name=base_model)


def to_spec(request: LoRARequest) -> StageSpec:
    """The version that a request names; one made by hand (offline, by path) has no digest."""
    scheme, _, rest = request.lora_path.partition(":")
    if scheme != _SCHEME:
        return StageSpec(request.lora_int_id, request.lora_name, "", request.lora_path, 0)
    digest, nbytes, path = rest.split(":", 2)
    return StageSpec(request.lora_int_id, request.lora_name, digest, path, int(nbytes))
