"""The tensors of an adapter put together by module: lora_A with lora_B, and the vectors over its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lora_plugin.adapter.checkpoint import TensorInfo
from lora_plugin.adapter.document import show, show_some
from lora_plugin.adapter.tensor_names import (
    LoraName,
    feature_of,
    parse_base_copy,
    parse_lora,
    parse_tokens,
    parse_vector,
    parse_whole,
)
from lora_plugin.errors import AdapterRejected, Code


@dataclass(frozen=True, slots=True)
class Pair:
    """lora_A and lora_B of one module; `embedding` says whether they are lora_embedding_A and _B."""

    a: TensorInfo
    b: TensorInfo
    embedding: bool


@dataclass(frozen=True, slots=True)
class Grouped:
    """An adapter's tensors by module.

    Attributes:
        pairs: lora_A and lora_B.
        vectors: vectors over a module's outputs by their kind, see `parse_vector`.
        tokens: the rows of trained tokens.
        copies: copies of base weights that PEFT saves beside targeted embeddings.
        whole: parameters that are saved whole, by their names in the trained model.
    """

    pairs: dict[str, Pair]
    vectors: dict[str, dict[str, TensorInfo]]
    tokens: dict[str, TensorInfo]
    copies: dict[str, TensorInfo]
    whole: dict[str, TensorInfo]


def group_tensors(tensors: Iterable[TensorInfo]) -> Grouped:
    """Sort an adapter's tensors.

    Raises:
        AdapterRejected: TENSOR_PAIR_MISSING, TENSOR_UNKNOWN, FEATURE_UNSUPPORTED or WEIGHTS_INVALID.
    """
    names: dict[str, LoraName] = {}
    parts: dict[str, dict[str, TensorInfo]] = {}
    vectors: dict[str, dict[str, TensorInfo]] = {}
    tokens: dict[str, TensorInfo] = {}
    copies: dict[str, TensorInfo] = {}
    whole: dict[str, TensorInfo] = {}
    for tensor in tensors:
        if (name := parse_lora(tensor.name)) is not None:
            names[tensor.name] = name
            _place(parts.setdefault(name.module, {}), name.part, tensor)
        elif (vector := parse_vector(tensor.name)) is not None:
            _place(vectors.setdefault(vector[0], {}), vector[1], tensor)
        elif (module := parse_tokens(tensor.name)) is not None:
            _place(tokens, module, tensor)
        elif (base := parse_base_copy(tensor.name)) is not None:
            _place(copies, base, tensor)
        elif (parameter := parse_whole(tensor.name)) is not None and feature_of(tensor.name) is None:
            _place(whole, parameter, tensor)
        else:
            raise _not_lora(tensor)
    for parameter in [name for name in whole if name.endswith(".weight")]:
        # A bias beside a whole weight was saved with it, and is no bias that `bias` speaks of.
        module = parameter.removesuffix(".weight")
        if vectors.get(module, {}).keys() == {"bias"}:
            whole[f"{module}.bias"] = vectors.pop(module)["bias"]
    if not parts:
        raise AdapterRejected(Code.WEIGHTS_INVALID, "the weights hold no lora_A and lora_B")
    _check_one_adapter(names.values())
    pairs = {module: _pair(found, names) for module, found in parts.items()}
    return Grouped(pairs, vectors, tokens, copies, whole)


def _place(found: dict[str, TensorInfo], key: str, tensor: TensorInfo) -> None:
    other = found.setdefault(key, tensor)
    if other is not tensor:
        raise AdapterRejected(
            Code.WEIGHTS_INVALID,
            f"{show(tensor.name)} is stored twice",
            found=f"{show(other.name)} too",
        )


def _check_one_adapter(names: Iterable[LoraName]) -> None:
    adapters = {name.adapter for name in names}
    if len(adapters) > 1:
        raise AdapterRejected(
            Code.WEIGHTS_INVALID,
            "the weights hold more than one adapter",
            found=show_some(sorted(adapters, key=str)),
            hint="save each into a folder of its own",
        )


def _pair(parts: Mapping[str, TensorInfo], names: Mapping[str, LoraName]) -> Pair:
    if len(parts) == 2:
        a, b = parts["A"], parts["B"]
        embedding = names[a.name].embedding
        if embedding == names[b.name].embedding:
            return Pair(a, b, embedding)
    tensor = next(iter(parts.values()))
    raise AdapterRejected(
        Code.TENSOR_PAIR_MISSING,
        f"{show(tensor.name)} has no counterpart",
        expected=show(_counterpart(tensor.name, names[tensor.name])),
        hint="save the whole adapter again",
    )


def _counterpart(key: str, name: LoraName) -> str:
    infix = "lora_embedding_" if name.embedding else "lora_"
    head, _, tail = key.rpartition(infix + name.part)
    return head + infix + ("B" if name.part == "A" else "A") + tail


def _not_lora(tensor: TensorInfo) -> AdapterRejected:
    feature = feature_of(tensor.name)
    if feature is not None:
        return AdapterRejected(
            Code.FEATURE_UNSUPPORTED, f"{show(tensor.name)} belongs to {feature}, which is not supported"
        )
    return AdapterRejected(
        Code.TENSOR_UNKNOWN,
        f"{show(tensor.name)} is not a tensor of a LoRA",
        expected="<module>.lora_A.weight and <module>.lora_B.weight, or lora_embedding_A and _B",
    )
