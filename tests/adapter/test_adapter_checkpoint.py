"""The safetensors header: what we accept the safetensors library accepts too, and reads the same."""

from __future__ import annotations

import json
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_bytes

from lora_plugin.adapter.checkpoint import ITEM_SIZES, TensorInfo, parse_head, read_head
from lora_plugin.adapter.files import FileStamp
from lora_plugin.errors import AdapterIncomplete, Code, LoraPluginError


def blob(header: Any, data: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def parse(raw: bytes) -> tuple[TensorInfo, ...]:
    length = int.from_bytes(raw[:8], "little")
    return parse_head(raw[: 8 + length], len(raw), "f")


def entry(dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"[]", 0),
        (b"{", 0),
        (b"\xff\xff", 0),
        (b'{"a": 1, "a": 1}', 0),
        ({"a": []}, 0),
        ({"a": None}, 0),
        ({"a": {"dtype": "F32", "shape": [6]}}, 24),
        ({"a": entry(dtype=4)}, 24),
        ({"a": entry(shape=(2, 2))}, 24),
        ({"a": entry(shape=(-2, -3))}, 24),
        ({"a": entry(shape=(2, 3.0))}, 24),
        ({"a": entry(shape=(True, 6))}, 24),
        ({"a": entry(shape=(1,) * 9 + (6,))}, 24),
        ({"a": entry(shape=(1 << 62, 0), offsets=(0, 0))}, 0),
        ({"a": entry(offsets=(24, 0))}, 24),
        ({"a": entry(offsets=(8, 32))}, 32),
        ({"a": entry(offsets=(-24, 0))}, 24),
        ({"a": entry(offsets=(0, 24, 48))}, 48),
        ({"a": entry(), "b": entry()}, 24),
        ({"a": entry(), "b": entry(offsets=(12, 36))}, 36),
        ({"a": entry(), "b": entry(offsets=(28, 52))}, 52),
        ({"a": entry()}, 25),
        ({}, 1),
    ],
)
def test_headers_that_are_refused(header: Any, data: int) -> None:
    with pytest.raises(LoraPluginError) as caught:
        parse(blob(header, data))
    assert caught.value.code is Code.WEIGHTS_INVALID


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "F4", "", "f32", "F128"])
def test_dtypes_that_are_refused(dtype: str) -> None:
    with pytest.raises(LoraPluginError) as caught:
        parse(blob({"a": entry(dtype=dtype)}, 24))
    assert caught.value.code is Code.DTYPE_UNSUPPORTED


def test_as_many_tensors_as_any_adapter_has_and_no_object_of_any_size() -> None:
    """One object is parsed at a stretch: what takes a second stops every stream of the server."""
    most = {f"{i}": entry(shape=[0], offsets=(0, 0)) for i in range(72_000)}
    assert len(parse(blob(most, 0))) == 72_000
    with pytest.raises(LoraPluginError) as caught:
        parse(blob(dict.fromkeys(map(str, range(400_000)), 1), 0))
    assert caught.value.code is Code.TOO_LARGE


def test_a_file_that_is_shorter_than_its_header_says() -> None:
    with pytest.raises(AdapterIncomplete) as caught:
        parse(blob({"a": entry()}, 23))
    assert caught.value.code is Code.INCOMPLETE


def test_offsets_are_those_of_the_file() -> None:
    header = {"b": entry(offsets=(24, 48)), "__metadata__": {"format": "pt"}, "a": entry()}
    raw = blob(header, 48)
    start = len(raw) - 48
    assert parse(raw) == (
        TensorInfo("a", "F32", (2, 3), "f", start, start + 24),
        TensorInfo("b", "F32", (2, 3), "f", start + 24, start + 48),
    )


SIZES = st.integers(-1, 4)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*ITEM_SIZES, "I8"]),
        "shape": st.lists(SIZES, max_size=3),
        "data_offsets": st.tuples(SIZES, st.integers(0, 64)),
    }
)


def agree(raw: bytes) -> None:
    """We refuse with an error of the family, or the library reads the same tensors."""
    try:
        found = parse(raw)
    except LoraPluginError as error:
        str(error).encode()
        return
    tensors = load_bytes(raw)
    assert {tensor.name: tensor.shape for tensor in found} == {k: tuple(t.shape) for k, t in tensors.items()}
    for tensor in found:
        stored = tensors[tensor.name].flatten().view(torch.uint8)
        assert raw[tensor.start : tensor.stop] == stored.numpy().tobytes()


@settings(max_examples=150)
@given(header=st.dictionaries(st.text(max_size=4), ENTRIES, max_size=3), data=st.integers(0, 96))
@example(header={}, data=0)
def test_any_header(header: dict[str, Any], data: int) -> None:
    agree(blob(header, data))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mutation_of_a_good_file(data: st.DataObject, saved: Path) -> None:
    raw = bytearray((saved / "adapter_model.safetensors").read_bytes())
    end = 8 + int.from_bytes(raw[:8], "little")
    for position in data.draw(st.lists(st.integers(8, end - 1), min_size=1, max_size=2)):
        raw[position] = data.draw(st.sampled_from(list(b'0123456789"{}[],:ABl \xff')))
    agree(bytes(raw))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=40))
def test_any_bytes(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(raw)
    stamp = FileStamp.of("f", path, path.stat())
    try:
        with FileIO(path) as file:
            found = parse_head(read_head(file, stamp), len(raw), "f")
    except LoraPluginError:
        return
    assert len(safetensors.deserialize(raw)) == len(found)
