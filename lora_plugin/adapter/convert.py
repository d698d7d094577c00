"""An adapter rewritten so that it can be served: one safetensors file, PEFT's names, a plain LoRA.

Pickles are read by torch's safe loader only, and never by a server.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_plugin.adapter.config import CONFIG_FILE, MAX_CONFIG_BYTES, AdapterConfig
from lora_plugin.adapter.document import parse_object, show
from lora_plugin.adapter.folder import PICKLED, WEIGHTS_FILE, snapshot
from lora_plugin.adapter.inspection import all_tensors, read_heads
from lora_plugin.adapter.pack import SERVED
from lora_plugin.adapter.tensor_names import peft_key
from lora_plugin.errors import AdapterIncomplete, AdapterRejected, Code

_ANY_SIZE: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written.

    Attributes:
        tensors: how many.
        nbytes: the size of the weights.
        changes: what differs from the source, in words.
    """

    tensors: int
    nbytes: int
    changes: tuple[str, ...]


def convert(
    source: Path, target: Path, *, dtype: str | None = None, initial: Path | None = None
) -> Converted:
    """Write what `source` holds to the new folder `target`, whole or not at all.

    Args:
        source: the adapter's folder.
        target: must not exist.
        dtype: a key of `SERVED` to cast to; None leaves every tensor's own.
        initial: the adapter as it was initialised, for one relative to a changed base (PiSSA and the like).

    Raises:
        AdapterRejected: it cannot be made servable.
        AdapterIncomplete: files are missing, or not whole.
        FileExistsError: there is something at `target`.
    """
    config, tensors = _read_config(source), _read_tensors(source)
    changes = [] if (source / WEIGHTS_FILE).is_file() else [f"written as {WEIGHTS_FILE}"]
    tensors, renamed = _renamed(tensors)
    if renamed:
        changes.append(f"{renamed} tensors renamed as PEFT names them")
    if initial is not None:
        start, _ = _renamed(_read_tensors(initial))
        config, tensors = _plain_config(config), _minus(tensors, start)
        changes.append("the initial adapter subtracted: the rank is doubled")
    AdapterConfig.from_bytes(json.dumps(config).encode())
    if dtype is not None:
        tensors = {key: _cast(key, tensor, SERVED[dtype]) for key, tensor in tensors.items()}
        changes.append(f"cast to {dtype}")
    _write(target, config, tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Converted(len(tensors), nbytes, tuple(changes))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise AdapterIncomplete(Code.CONFIG_MISSING, f"there is no {CONFIG_FILE}")
    with path.open("rb") as file:
        return parse_object(file.read(MAX_CONFIG_BYTES + 1), CONFIG_FILE, Code.CONFIG_INVALID)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    pickled = next((folder / name for name in PICKLED if (folder / name).is_file()), None)
    if pickled is not None and not any(folder.glob("adapter_model*.safetensors")):
        return _unpickle(pickled)
    folder = folder.absolute()
    seen = snapshot(folder.parent, folder.name, _ANY_SIZE, trusted=True)
    all_tensors(seen, read_heads(seen))
    return {key: tensor for stamp in seen.weights for key, tensor in load_file(stamp.path).items()}


def _unpickle(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever a broken pickle provokes
        raise AdapterRejected(
            Code.WEIGHTS_FORMAT,
            f"{path.name} cannot be read by torch's safe loader",
            expected="a pickle of tensors only",
            found=show(str(error).strip().partition("\n")[0]),
            hint="load it where it was made, and save it with safe_serialization=True",
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise AdapterRejected(Code.WEIGHTS_INVALID, f"{path.name} holds something else than named tensors")
    return {str(key): tensor for key, tensor in tensors.items()}


def _renamed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """The tensors under PEFT's names, and how many had others."""
    named = {peft_key(key): tensor for key, tensor in tensors.items()}
    if len(named) < len(tensors):
        raise AdapterRejected(
            Code.WEIGHTS_INVALID,
            "two tensors are the same one of the model",
            found="more than one adapter, or one stored twice",
            hint="save each adapter into a folder of its own",
        )
    return named, sum(key not in tensors for key in named)


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the difference: twice the rank at the same scale, as PEFT writes it."""
    factor = math.sqrt(2) if config.get("use_rslora") else 2
    ranks = {key: 2 * rank for key, rank in (config.get("rank_pattern") or {}).items()}
    alphas = {key: factor * alpha for key, alpha in (config.get("alpha_pattern") or {}).items()}
    checked = AdapterConfig.from_bytes(json.dumps(config | {"init_lora_weights": True}).encode())
    return config | {
        "init_lora_weights": True,
        "r": 2 * checked.r,
        "lora_alpha": factor * checked.alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }


def _minus(tensors: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """B A - B0 A0 as one product: [B | -B0] and [A ; A0]."""
    other = next(iter(tensors.keys() ^ start.keys()), None)
    if other is None:
        other = next((key for key in tensors if tensors[key].shape != start[key].shape), None)
    if other is not None:
        raise AdapterRejected(
            Code.WEIGHTS_INVALID,
            f"the initial adapter is not the one that this was trained from: {show(other)}",
            expected="the same tensors in both, of the same shapes",
        )
    return {key: _joined(key, tensor, start[key]) for key, tensor in tensors.items()}


def _joined(key: str, tensor: Tensor, start: Tensor) -> Tensor:
    if key.endswith(".lora_A.weight"):
        return torch.cat([tensor, start])
    if key.endswith(".lora_B.weight"):
        return torch.cat([tensor, -start], dim=1)
    raise AdapterRejected(
        Code.FEATURE_UNSUPPORTED, f"{show(key)} cannot be converted: only linear layers can"
    )


def _cast(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype)
    if not bool(torch.isfinite(cast).all()):
        raise AdapterRejected(
            Code.NOT_FINITE, f"{show(key)} cannot be cast", expected=f"finite numbers in {dtype}"
        )
    return cast


def _write(target: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    # A hidden name: a watched directory may be where it is written to.
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        settings = partial / CONFIG_FILE
        settings.write_text(json.dumps(config, indent=2) + "\n")
        own = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        save_file(own, partial / WEIGHTS_FILE, {"format": "pt"})
        # safetensors gives them to their owner alone; the server may run as another user.
        shutil.copymode(settings, partial / WEIGHTS_FILE)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
