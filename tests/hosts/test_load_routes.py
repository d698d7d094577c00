"""The host's endpoint that loads an adapter, without the host: whom plugins are asked about."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("catalog", "hooks")]

from catalog_samples import LAYOUT, MemoryLink, write_adapter
from hook_samples import plugin
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

from lora_plugin.hooks import Refusal
from lora_plugin.hooks.manager import HookManager
from lora_plugin.hosts.vllm.load_routes import load_lora_adapter
from lora_plugin.service import Service
from lora_plugin.settings import Settings


class Engines(MemoryLink):
    async def versions(self, name: str) -> list[list[dict[str, Any]]]:
        return [[]]


async def test_another_name_is_for_those_who_may_have_the_adapter(tmp_path: Path) -> None:
    for name in ("ours", "hidden", "open"):
        write_adapter(tmp_path / name)
    asked = []

    def authorize(adapter: str) -> Refusal | None:
        asked.append(adapter)
        return {"ours": Refusal("it is ours"), "hidden": Refusal("", 404)}.get(adapter)

    settings = Settings(adapter_dir=tmp_path, admin_port=0, settle_seconds=0.01)
    hooks, engines = HookManager([plugin("door", authorize)]), Engines()
    service = Service(settings, engines, LAYOUT, hooks, base_models=("base",), with_admin=False)  # type: ignore[arg-type]
    await service.start()
    models = SimpleNamespace(lora_plugin_service=service, base_model_paths=[SimpleNamespace(name="base")])

    async def load(name: str, path: str) -> tuple[int, str]:
        request = LoadLoRAAdapterRequest(lora_name=name, lora_path=path)
        answer = await load_lora_adapter(lambda: None)(models, request)
        return (200, answer) if isinstance(answer, str) else (answer.error.code, answer.error.message)

    try:
        for path in ("ours", f"{tmp_path}/open/../ours"):
            assert await load("mine", path) == (403, "it is ours [forbidden]")
        hidden, nothing = await load("mine", "hidden"), await load("mine", "nobody")
        assert hidden[0] == 404
        assert hidden[1].replace("hidden", "nobody") == nothing[1]
        assert not (tmp_path / "mine").exists()
        assert (await load("mine", "open"))[0] == 200
        assert (tmp_path / "mine").resolve() == tmp_path / "open"
    finally:
        service.stop()
    assert asked == ["ours", "ours", "hidden", "open"]
