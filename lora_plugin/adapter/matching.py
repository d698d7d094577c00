"""From the tensors of an adapter to the layers of the model: every name, shape and rank is checked here.

Nothing but headers is needed, so the API server refuses what does not fit without reading a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Final

from lora_plugin.adapter.checkpoint import TensorInfo
from lora_plugin.adapter.config import AdapterConfig
from lora_plugin.adapter.document import show
from lora_plugin.adapter.outputs import match_outputs
from lora_plugin.adapter.pairs import Pair, group_tensors
from lora_plugin.adapter.plan import LayerPlan, OutputPlan, Plan, SlicePlan, TokenPlan
from lora_plugin.adapter.saved import match_saved, saved_warnings
from lora_plugin.adapter.targets import Target, find_targets
from lora_plugin.adapter.tokens import match_tokens
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import AFFINE_ROWS, Kind, Layer, ModelLayout, max_rank_hint

_DTYPE_SIZES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}


def match(tensors: Mapping[str, TensorInfo], layout: ModelLayout, config: AdapterConfig) -> Plan:
    """Map every tensor to a slice of the model.

    Raises:
        AdapterRejected: TENSOR_UNKNOWN, TENSOR_PAIR_MISSING, SHAPE_MISMATCH, RANK_MISMATCH, RANK_TOO_LARGE,
            FEATURE_UNSUPPORTED or WEIGHTS_INVALID.
    """
    grouped = group_tensors(tensors.values())
    pairs, copies = grouped.pairs, grouped.copies
    targets = find_targets(pairs, layout)
    slices: dict[int, dict[int, SlicePlan]] = {}
    for module, pair in pairs.items():
        target = targets[module]
        plans = _slice_plans(module, pair, target, layout, config)
        _add(slices.setdefault(target.layer, {}), plans, layout.layers[target.layer])
    outputs = match_outputs(grouped, targets, layout, config)
    tokens = match_tokens(grouped, targets, layout, config)
    saved = match_saved(grouped, targets, layout, config)
    layers = tuple(
        _layer_plan(index, slices.get(index, {}), outputs.get(index, {}), tokens.get(index), layout)
        for index in sorted({*slices, *outputs, *tokens})
    )
    plan = Plan(
        rank=max(layer.rank for layer in layers),
        targets=tuple(sorted({module.rpartition(".")[2] for module in (*pairs, *grouped.tokens)})),
        layers=layers,
        nbytes=packed_nbytes(layers, layout),
        warnings=(*_check_copies(copies, layout), *saved_warnings(saved, layout)),
        saved=saved,
    )
    _check_rows(plan, layout.max_rank)
    return plan


def _slice_plans(
    module: str, pair: Pair, target: Target, layout: ModelLayout, config: AdapterConfig
) -> dict[int, SlicePlan]:
    layer = layout.layers[target.layer]
    rank = config.rank(module)
    _check_kind(module, pair, layer)
    _check_rank(module, pair, rank, layout.max_rank)
    outs = [layer.slices[index].out_features for index in target.slices]
    _check_shape(pair.a, (rank, layer.slices[target.slices[0]].in_features))
    _check_shape(pair.b, (sum(outs), rank))
    ends = list(accumulate(outs))
    scale = config.scale(module)
    return {
        index: SlicePlan(pair.a, pair.b, (end - out, end), rank, scale)
        for index, out, end in zip(target.slices, outs, ends, strict=True)
    }


def _check_kind(module: str, pair: Pair, layer: Layer) -> None:
    if pair.embedding != (layer.kind is Kind.EMBEDDING):
        raise AdapterRejected(
            Code.SHAPE_MISMATCH,
            f"{show(module)} is stored as another kind of module than the model's",
            expected=str(layer.kind),
            found="an embedding" if pair.embedding else "a linear layer",
        )


def _check_rank(module: str, pair: Pair, rank: int, max_rank: int) -> None:
    stored = pair.a.shape[0] if pair.a.shape else 0
    if len(pair.a.shape) == 2 and stored != rank:
        raise AdapterRejected(
            Code.RANK_MISMATCH,
            f"the rank of {show(module)} in adapter_config.json is not its tensors' rank",
            expected=f"r={rank} (r or rank_pattern)",
            found=f"lora_A of shape {list(pair.a.shape)}, r={stored}",
            hint="a wrong r would scale the adapter wrongly; restore the config it was trained with",
        )
    if rank > max_rank:
        raise AdapterRejected(
            Code.RANK_TOO_LARGE,
            f"the rank of {show(module)} is above the server's maximum",
            expected=f"r <= {max_rank}",
            found=f"r={rank}",
            hint=max_rank_hint(rank),
        )


def _check_shape(tensor: TensorInfo, shape: tuple[int, int]) -> None:
    if tensor.shape == shape:
        return
    sharded = len(tensor.shape) < 2 or 0 in tensor.shape
    raise AdapterRejected(
        Code.SHAPE_MISMATCH,
        f"{show(tensor.name)} does not fit the model",
        expected=f"shape {list(shape)}",
        found=f"shape {list(tensor.shape)}",
        hint="gather sharded parameters (ZeRO-3, FSDP) before saving"
        if sharded
        else "the adapter may be for another base model",
    )


def _add(slices: dict[int, SlicePlan], plans: Mapping[int, SlicePlan], layer: Layer) -> None:
    for index, plan in plans.items():
        other = slices.setdefault(index, plan)
        if other is not plan:
            raise AdapterRejected(
                Code.WEIGHTS_INVALID,
                f"{show(layer.slices[index].name)} is targeted twice, alone and packed",
                found=f"{show(other.a.name)} and {show(plan.a.name)}",
            )


def _layer_plan(
    index: int,
    slices: Mapping[int, SlicePlan],
    outputs: Mapping[int, OutputPlan],
    tokens: TokenPlan | None,
    layout: ModelLayout,
) -> LayerPlan:
    count = range(len(layout.layers[index].slices))
    return LayerPlan(
        index,
        len(tokens.tokens) if tokens else max((plan.rank for plan in slices.values()), default=0),
        tuple(slices.get(i) for i in count),
        tuple(outputs.get(i) for i in count) if outputs else (),
        tokens,
    )


def packed_nbytes(layers: tuple[LayerPlan, ...], layout: ModelLayout) -> int:
    """Bytes of the packed layers on this rank."""
    total = 0
    for plan in layers:
        layer = layout.layers[plan.layer]
        total += plan.rank * layer.row_elements
        total += AFFINE_ROWS * sum(part.local_out for part in layer.slices) if plan.outputs else 0
    return total * _DTYPE_SIZES[layout.dtype]


def _check_rows(plan: Plan, max_rank: int) -> None:
    if plan.rows > max_rank:
        raise AdapterRejected(
            Code.RANK_TOO_LARGE,
            "the adapter needs more rows than the server's maximum: DoRA and biases take two beside its rank",
            expected=f"r <= {max_rank - AFFINE_ROWS}",
            found=f"r={plan.rank}",
            hint=max_rank_hint(plan.rows),
        )


def _check_copies(copies: Mapping[str, TensorInfo], layout: ModelLayout) -> tuple[str, ...]:
    """Copies of base embeddings are passed over, unless their shape says that the vocabulary was resized."""
    targets = find_targets(copies, layout)
    warnings = []
    for module, tensor in copies.items():
        layer = layout.layers[targets[module].layer]
        features = (layer.slices[0].out_features, layer.slices[0].in_features)
        shape = features if layer.kind is Kind.LM_HEAD else features[::-1]
        if layer.kind is Kind.LINEAR or tensor.shape != shape:
            raise AdapterRejected(
                Code.FEATURE_UNSUPPORTED,
                f"{show(tensor.name)} is a changed base weight (a resized vocabulary)",
                expected=f"shape {list(shape)}",
                found=f"shape {list(tensor.shape)}",
                hint="save it with save_embedding_layers=False if the vocabulary is the base model's",
            )
        warnings.append(f"{show(tensor.name)} is a copy of a base weight and is not used")
    return tuple(warnings)
