"""What is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import EngineArgs

from lora_plugin.errors import SettingsError
from lora_plugin.hosts.vllm import config
from lora_plugin.layout import MAX_RANKS, max_rank_hint


def test_a_hint_names_a_rank_that_the_host_takes() -> None:
    assert get_args(MaxLoRARanks) == MAX_RANKS
    for rows in range(2, 513):
        flag, _, rank = max_rank_hint(rows).rpartition(" ")
        assert flag == "start the server with --max-lora-rank"
        assert rows <= int(rank) < 8 + 2 * rows
        assert int(rank) in get_args(MaxLoRARanks)
    assert "merge" in max_rank_hint(513)


def test_kernels_that_cannot_be_had_end_the_start_in_words() -> None:
    vllm_config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        lora_config=SimpleNamespace(lora_dtype=torch.float16),
    )
    for fitting in ("auto", "torch"):
        config._refuse_kernels(fitting, vllm_config)
    for requested in ("triton", "native"):
        with pytest.raises(SettingsError, match="LORA_PLUGIN_KERNELS") as raised:
            config._refuse_kernels(requested, vllm_config)
        assert f"'{requested}' cannot be had on cpu" in str(raised.value)


def test_a_plugin_that_does_not_fit_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "odd_hooks.py").write_text(
        "from lora_plugin.hooks import hookimpl\n@hookimpl\ndef authorize(request, path): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LORA_PLUGIN_ADAPTER_DIR", str(tmp_path / "adapters"))
    monkeypatch.setenv("LORA_PLUGIN_HOOKS", "odd_hooks")
    config.process_hooks.cache_clear()
    create = config.configure_engine(lambda self: pytest.fail("the start went on"))
    with pytest.raises(SettingsError, match=r"'odd_hooks' does not fit.*'authorize'.*'path'"):
        create(EngineArgs(model="none", enable_lora=True))


def test_a_certificate_that_cannot_be_used_ends_the_start_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LORA_PLUGIN_ADAPTER_DIR", str(tmp_path / "adapters"))
    monkeypatch.setenv("LORA_PLUGIN_ADMIN_TLS_CERT", str(tmp_path / "none.pem"))
    config.process_hooks.cache_clear()
    create = config.configure_engine(lambda self: pytest.fail("the start went on"))
    with pytest.raises(SettingsError, match=r"none\.pem: No such file"):
        create(EngineArgs(model="none", enable_lora=True))
