"""The index of weights that are split over several files: which tensor is in which file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lora_plugin.adapter.checkpoint import TensorInfo
from lora_plugin.adapter.document import parse_object, show
from lora_plugin.errors import AdapterRejected, Code

INDEX_FILE: Final = "adapter_model.safetensors.index.json"
MAX_INDEX_BYTES: Final = 16 << 20


def parse_index(raw: bytes) -> dict[str, str]:
    """The weight map: tensor name to file name, each the plain name of a file in the adapter's folder.

    Raises:
        AdapterRejected: WEIGHTS_INVALID.
        AdapterIncomplete: INCOMPLETE, for a file that ends in the middle.
    """
    document = parse_object(raw, INDEX_FILE, Code.WEIGHTS_INVALID, growing=True)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise AdapterRejected(Code.WEIGHTS_INVALID, f"{INDEX_FILE} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or not _is_plain(file):
            raise AdapterRejected(
                Code.WEIGHTS_INVALID,
                f"{INDEX_FILE} names a file outside the folder or of another format",
                expected="the plain name of a .safetensors file",
                found=show(file),
            )
    return weight_map


def check_index(weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    """Raise AdapterRejected with WEIGHTS_INVALID unless the files hold exactly what the index says."""
    stored = {name: tensor.file for name, tensor in tensors.items()}
    if weight_map != stored:
        name, _ = min(weight_map.items() ^ stored.items())
        raise AdapterRejected(
            Code.WEIGHTS_INVALID,
            f"{INDEX_FILE} and the files disagree about {show(name)}",
            expected=f"in {show(weight_map.get(name))}",
            found=f"in {show(stored.get(name))}",
        )


def _is_plain(file: str) -> bool:
    return file.endswith(".safetensors") and file.isprintable() and "/" not in file and len(file) < 256
