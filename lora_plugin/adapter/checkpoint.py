"""The header of a safetensors file: checked against the file's length before any weight is read.

Format: 8 bytes little-endian length, a JSON object, then the tensors without gaps
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import FileIO
from typing import Any, Final

from lora_plugin.adapter.document import parse_object, show
from lora_plugin.adapter.files import FileStamp, read_into
from lora_plugin.errors import AdapterIncomplete, AdapterRejected, Code

MAX_HEADER_BYTES: Final = 32 << 20
_MAX_DIMENSIONS: Final = 8
_MAX_DIMENSION: Final = 1 << 40
_PREFIX: Final = 8
_LFS_POINTER: Final = b"version "

ITEM_SIZES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The dtypes that are served, with the bytes of one element."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor.

    Attributes:
        name: the key in the file.
        dtype: a key of `ITEM_SIZES`.
        shape: the stored shape.
        file: the file's name in the adapter's folder.
        start: offset of the first byte in the file.
        stop: offset after the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int


def read_head(file: FileIO, stamp: FileStamp) -> bytes:
    """The length prefix and the JSON of an opened file, which is then positioned at its first tensor.

    Raises:
        AdapterRejected: WEIGHTS_INVALID or TOO_LARGE.
        AdapterIncomplete: INCOMPLETE, if the file is shorter than its header says.
    """
    prefix = bytearray(min(_PREFIX, stamp.size))
    read_into(file, memoryview(prefix), stamp)
    head = bytearray(_PREFIX + _json_length(bytes(prefix), stamp))
    head[:_PREFIX] = prefix
    read_into(file, memoryview(head)[_PREFIX:], stamp)
    return bytes(head)


def parse_head(head: bytes, size: int, file: str) -> tuple[TensorInfo, ...]:
    """The tensors that a header describes, in the order of their bytes.

    Args:
        head: the length prefix and the JSON.
        size: the length of the whole file.
        file: the file's name.

    Raises:
        AdapterRejected: WEIGHTS_INVALID or DTYPE_UNSUPPORTED.
        AdapterIncomplete: INCOMPLETE, if the file is shorter than the header says.
    """
    entries = parse_object(head[_PREFIX:], f"the header of {file}", Code.WEIGHTS_INVALID)
    entries.pop("__metadata__", None)
    tensors = sorted(
        (_tensor(name, entry, file, len(head)) for name, entry in entries.items()),
        key=lambda tensor: (tensor.start, tensor.stop),
    )
    end = len(head)
    for tensor in tensors:
        if tensor.start != end:
            raise _invalid(file, f"the bytes of {show(tensor.name)} overlap others or leave a gap")
        end = tensor.stop
    if size < end:
        raise AdapterIncomplete(
            Code.INCOMPLETE, f"{file} is not whole yet", expected=f"{end} bytes", found=f"{size} bytes"
        )
    if size > end:
        raise _invalid(file, f"its header describes {end} bytes, but it has {size}")
    return tuple(tensors)


def _json_length(prefix: bytes, stamp: FileStamp) -> int:
    length = int.from_bytes(prefix, "little")
    # A preallocated copy in progress begins with zeros.
    if len(prefix) < _PREFIX or not length:
        raise AdapterIncomplete(
            Code.INCOMPLETE, f"{stamp.name} is not whole yet", found=f"{stamp.size} bytes"
        )
    if length > MAX_HEADER_BYTES:
        pointer = prefix.startswith(_LFS_POINTER)
        raise AdapterRejected(
            Code.WEIGHTS_INVALID,
            f"{stamp.name} is not a safetensors file that can be served",
            expected=f"a header of at most {MAX_HEADER_BYTES} bytes",
            found="a Git LFS pointer" if pointer else f"{length} bytes",
            hint="fetch the file itself with git lfs pull" if pointer else None,
        )
    if _PREFIX + length > stamp.size:
        raise AdapterIncomplete(
            Code.INCOMPLETE,
            f"{stamp.name} is not whole yet",
            expected=f"a header of {length} bytes",
            found=f"{stamp.size} bytes in all",
        )
    return length


def _tensor(name: str, entry: Any, file: str, data_start: int) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise _invalid(file, f"the entry of {show(name)} is malformed")
    if dtype not in ITEM_SIZES:
        raise AdapterRejected(
            Code.DTYPE_UNSUPPORTED,
            f"the dtype of {show(name)} is not served",
            expected=", ".join(ITEM_SIZES),
            found=show(dtype),
        )
    if len(shape) > _MAX_DIMENSIONS or not all(_is_size(n) for n in (*shape, begin, end)):
        raise _invalid(file, f"the shape or the offsets of {show(name)} are no sizes")
    if end - begin != math.prod(shape) * ITEM_SIZES[dtype]:
        raise _invalid(file, f"the shape of {show(name)} does not fit its {end - begin} bytes")
    return TensorInfo(name, dtype, tuple(shape), file, data_start + begin, data_start + end)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_DIMENSION


def _invalid(file: str, found: str) -> AdapterRejected:
    return AdapterRejected(
        Code.WEIGHTS_INVALID, f"{file} is not a valid safetensors file", found=found, hint="save it again"
    )
