"""Files that nobody meant well: a refusal with a code, bounded memory, no read beyond what was checked."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adapter_samples import LIMIT, base_model, llama_layout
from base_weights import WeightsModel
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lora_plugin.adapter.checkpoint import MAX_HEADER_BYTES, parse_head
from lora_plugin.adapter.config import AdapterConfig
from lora_plugin.adapter.index import parse_index
from lora_plugin.adapter.inspection import inspect
from lora_plugin.adapter.load import load
from lora_plugin.errors import LoraPluginError
from lora_plugin.layout import ModelLayout

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUIET = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([2**31, 2**40, 2**63, 10**400, -(2**63), True, 1.5, float("nan"), float("inf"), 1e400]),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
LEAVES = (
    *(".lora_A.weight", ".lora_B.weight", ".lora_A", ".lora_B.default.weight", ".lora_A.weight.weight"),
    *(".lora_embedding_A", ".lora_embedding_B", ".lora_B.bias", ".bias", ".base_layer.bias", ".weight"),
    *(".lora_magnitude_vector", ".token_adapter.trainable_tokens_delta", ".modules_to_save.default.weight"),
    *(".base_layer.weight", ".lora_diag", ""),
)
NAMES = st.one_of(
    st.builds(
        "{}layers.{}.{}{}".format,
        st.sampled_from(["base_model.model.model.", "model.", "", "base_model.model.", "model.model."]),
        st.integers(0, 3),
        st.sampled_from(
            ["self_attn.q_proj", "mlp.down_proj", "self_attn.qkv_proj", "experts.0.w1", "x" * 300]
        ),
        st.sampled_from(LEAVES),
    ),
    st.builds(
        "base_model.model.{}{}".format,
        st.sampled_from(["model.embed_tokens", "lm_head", "model.norm"]),
        st.sampled_from(LEAVES),
    ),
    st.text(max_size=12),
)
ENTRIES = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "F8_E4M3", "f32", ""]),
            "shape": st.lists(NUMBERS, max_size=4),
            "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
        }
    ),
)
FIELDS = st.sampled_from(
    [
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
        *("lora_bias", "trainable_token_indices", "ensure_weight_tying"),
        *("init_lora_weights", "modules_to_save", "use_dora", "base_model_name_or_path", "target_modules"),
    ]
)


FEATURES = st.fixed_dictionaries(
    {},
    optional={
        "use_dora": st.just(True),
        "lora_bias": st.just(True),
        "bias": st.just("all"),
        "trainable_token_indices": st.sampled_from([[1], [1, 2], {"lm_head": [3]}, [70]]),
        "modules_to_save": st.sampled_from([["embed_tokens"], ["lm_head", "norm"], ["q_proj"]]),
    },
)
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
STORED = st.tuples(st.sampled_from(list(SIZES)), st.lists(st.sampled_from([0, 1, 2, 8, 32, 64]), max_size=3))


def safetensors(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


@QUIET
@given(raw=st.one_of(st.binary(max_size=64), JSON.map(lambda value: json.dumps(value).encode())))
@example(raw=b"[" * 100_000)
@example(raw=b'{"weight_map":' * 1000)
@example(raw=b'{"r":' + b"9" * 5000 + b"}")
def test_documents(raw: bytes) -> None:
    for parse in (
        AdapterConfig.from_bytes,
        parse_index,
        lambda r: parse_head(bytes(8) + r, len(r) + 8, WEIGHTS),
    ):
        try:
            parse(raw)
        except LoraPluginError as error:
            str(error).encode()


@QUIET
@given(changes=st.dictionaries(FIELDS, JSON, max_size=4))
def test_configs(changes: dict[str, Any], folder: Path) -> None:
    original = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(json.dumps(json.loads(original) | changes))
    look(folder)
    (folder / CONFIG).write_text(original)


@QUIET
@given(
    header=st.dictionaries(NAMES, ENTRIES, max_size=6),
    data=st.binary(max_size=600),
    length=st.one_of(st.none(), st.integers(0, 2**64 - 1), st.integers(0, 700)),
)
def test_headers(header: dict[str, Any], data: bytes, length: int | None, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(safetensors(json.dumps(header).encode(), data, length))
    look(folder)


@QUIET
@given(tensors=st.dictionaries(NAMES, STORED, min_size=1, max_size=6), features=FEATURES)
def test_whole_files(
    tensors: dict[str, tuple[str, list[int]]], features: dict[str, Any], folder: Path
) -> None:
    """Headers in which all adds up, of any names, dtypes and shapes, beside whatever a config switches on."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    original = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(json.dumps(json.loads(original) | features))
    (folder / WEIGHTS).write_bytes(safetensors(json.dumps(header).encode(), bytes(end)))
    look(folder)
    (folder / CONFIG).write_text(original)


def with_base(root: Path, name: str, layout: ModelLayout, limit: int) -> None:
    load(root, name, layout, None, limit, base=WeightsModel(base_model(), layout))


def look(folder: Path) -> None:
    """Every way to look at the folder ends with a result or an error of the family that can be shown."""
    for check in (inspect, lambda *a: load(a[0], a[1], a[2], None, a[3]), with_base):
        try:
            check(folder.parent, folder.name, llama_layout(), LIMIT)
        except LoraPluginError as error:
            str(error).encode()


def monsters() -> Iterator[tuple[str, bytes, int]]:
    """Name, first bytes and length of files made to exhaust whoever reads them; the rest is a hole."""
    huge = json.dumps({"a": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}).encode()
    yield "a tensor of a terabyte", safetensors(huge, b""), 8 + len(huge) + (1 << 40)
    yield "a header of a terabyte", (1 << 40).to_bytes(8, "little"), 1 << 41
    yield "a header of 2**64 - 1 bytes", b"\xff" * 8, 1 << 20
    for name, part in (("lists", b"[],"), ("objects", b'{"":0},'), ("numbers", b"1,")):
        header = b'{"a":[' + part * ((30 << 20) // len(part)) + b"0]}"
        yield f"a header of {name}", safetensors(header, b""), 8 + len(header)
    header = b"{" + b",".join(b'"%x":0' % i for i in range(3 << 20)) + b"}"
    yield "a header of keys", safetensors(header, b""), 8 + len(header)
    header = b'{"' + "\N{SNOWMAN}".encode() * (10 << 20) + b'":0}'
    yield "a name of 30 MiB", safetensors(header, b""), 8 + len(header)
    yield "nesting", safetensors(b'{"a":' + b"[" * (8 << 20), b""), 8 + 5 + (8 << 20)


_CHILD = """
    import json, resource, sys
    from pathlib import Path
    from lora_plugin.adapter.inspection import inspect
    from lora_plugin.adapter.load import load
    from lora_plugin.errors import LoraPluginError
    from lora_plugin.layout import ModelLayout
    root, layout = Path(sys.argv[1]), ModelLayout.from_dict(json.loads(sys.argv[2]))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), -1))
    def read():
        return int(Path("/proc/self/io").read_text().split()[1])
    for folder in sorted(root.iterdir()):
        for check in (inspect, lambda *a: load(a[0], a[1], a[2], None, a[3])):
            before = read()
            try:
                check(root, folder.name, layout, 1 << 50)
            except LoraPluginError as error:
                print(folder.name, error.code, len(str(error)), read() - before, sep=":")
"""


def test_memory_is_bounded(saved: Path, tmp_path: Path) -> None:
    """In a process whose address space cannot grow by more than 400 MiB; nothing is read but headers."""
    names = []
    for name, first, length in monsters():
        folder = shutil.copytree(saved, tmp_path / name)
        with (folder / WEIGHTS).open("wb") as file:
            file.write(first)
            file.truncate(max(length, len(first)))
        names += [name, name]
    command = [sys.executable, "-c", textwrap.dedent(_CHILD), str(tmp_path)]
    result = subprocess.run(
        [*command, json.dumps(llama_layout().to_dict())], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-2000:]
    refusals = [line.split(":") for line in result.stdout.splitlines()]
    assert [name for name, *_ in refusals] == sorted(names)
    assert all(int(length) < 2000 for _, _, length, _ in refusals)
    for name, _, _, count in refusals:
        header = int.from_bytes((tmp_path / name / WEIGHTS).open("rb").read(8), "little")
        allowed = header if header <= MAX_HEADER_BYTES else 0
        assert int(count) <= allowed + (64 << 10), name
