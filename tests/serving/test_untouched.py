"""With the plugin off, nothing of the host is touched; with it on, everything is, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_NAMES = """
import importlib, sys, inspect
import vllm.plugins
{before}
def names():
    from lora_plugin.hosts.vllm.patches import SEAMS
    found = {{}}
    for seam in SEAMS:
        owner = importlib.import_module(seam.module)
        *path, leaf = seam.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        found[seam.target] = id(inspect.getattr_static(owner, leaf, None))
    return found
"""


def run(script: str, **env: str) -> str:
    """The output of a fresh interpreter."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LORA_PLUGIN_")}
    result = subprocess.run(
        [sys.executable, "-c", script], env={**clean, **env}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("env", [{}, {"LORA_PLUGIN_ADAPTER_DIR": "/tmp/x", "LORA_PLUGIN_ENABLED": "0"}])
def test_switched_off_changes_nothing(env: dict[str, str]) -> None:
    script = _NAMES.format(before="") + (
        "before = names(); vllm.plugins.load_general_plugins(); assert names() == before\n"
        "import lora_plugin.plugin; lora_plugin.plugin.register(); assert names() == before; print('same')\n"
    )
    assert run(script, **env).endswith("same\n")


def test_switched_on_every_seam_is_applied_once(tmp_path: Path) -> None:
    script = _NAMES.format(before="") + (
        "before = names(); vllm.plugins.load_general_plugins(); once = names()\n"
        "from lora_plugin.hosts.vllm.patches import SEAMS\n"
        "kept = [seam.target for seam in SEAMS if seam.keeps]; assert kept\n"
        "assert [name for name in before if before[name] == once[name]] == kept\n"
        "import lora_plugin.plugin; lora_plugin.plugin.register(); assert names() == once; print('applied')\n"
    )
    assert run(script, LORA_PLUGIN_ADAPTER_DIR=str(tmp_path)).endswith("applied\n")


def test_a_host_that_does_not_fit_is_left_alone_and_refused(tmp_path: Path) -> None:
    """One target renamed: no seam is applied, `vllm --help` works, an engine's start says why."""
    script = _NAMES.format(before="") + (
        "from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin as mixin\n"
        "mixin.renamed = mixin.set_active_loras; del mixin.set_active_loras\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "before = names(); vllm.plugins.load_general_plugins(); after = names()\n"
        "print(sorted(name for name in before if before[name] != after[name]))\n"
        "try: EngineArgs(model='x').create_engine_config()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    out = run(script, LORA_PLUGIN_ADAPTER_DIR=str(tmp_path))
    assert "['vllm.engine.arg_utils:EngineArgs.create_engine_config']" in out
    assert "HostIncompatible" in out
    assert "set_active_loras is gone" in out


def test_every_target_that_is_renamed_is_named_and_refused(tmp_path: Path) -> None:
    """One after the other; none is applied. The same for a name that the plugin's own modules import."""
    script = _NAMES.format(before="") + (
        "import lora_plugin.plugin, vllm.exceptions\n"
        "from lora_plugin.errors import HostIncompatible\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "def refusal():\n"
        "    kept = EngineArgs.create_engine_config\n"
        "    lora_plugin.plugin.register()\n"
        "    try: EngineArgs(model='x').create_engine_config()\n"
        "    except HostIncompatible as error: return str(error)\n"
        "    finally: EngineArgs.create_engine_config = kept\n"
        "gone = vllm.exceptions.VLLMNotFoundError; del vllm.exceptions.VLLMNotFoundError\n"
        "assert 'VLLMNotFoundError' in refusal(); vllm.exceptions.VLLMNotFoundError = gone\n"
        "from lora_plugin.hosts.vllm.patches import SEAMS\n"
        "for seam in SEAMS:\n"
        "    owner, leaf = seam._owner()\n"
        "    kept = inspect.getattr_static(owner, leaf, None)\n"
        "    setattr(owner, leaf, None) if seam.adds else delattr(owner, leaf)\n"
        "    if 'create_engine' not in seam.name: assert seam.target in refusal(), seam.target\n"
        "    assert not any(seam.is_applied() for seam in SEAMS)\n"
        "    delattr(owner, leaf) if seam.adds else setattr(owner, leaf, kept)\n"
        "print('refused', len(SEAMS))\n"
    )
    assert "refused" in run(script, LORA_PLUGIN_ADAPTER_DIR=str(tmp_path))


def test_the_entry_point_is_cheap_when_it_is_not_wanted() -> None:
    script = (
        "import sys, importlib.metadata as m\n"
        "(entry,) = [e for e in m.entry_points(group='vllm.general_plugins') if e.name == 'lora_plugin']\n"
        "entry.load()()\n"
        "print([name for name in ('torch', 'vllm', 'pydantic', 'aiohttp', 'numpy') if name in sys.modules])\n"
    )
    assert run(script).endswith("[]\n")
