"""What is refused before a model is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lora_plugin.errors import SettingsError
from lora_plugin.hosts.vllm import config


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
