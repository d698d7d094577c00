"""Where the vectors over outputs go: DoRA's magnitudes, and trained biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from lora_plugin.adapter.checkpoint import TensorInfo
from lora_plugin.adapter.config import AdapterConfig
from lora_plugin.adapter.document import show
from lora_plugin.adapter.pairs import Grouped
from lora_plugin.adapter.plan import OutputPlan
from lora_plugin.adapter.targets import Target, find_targets
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import Kind, Layer, ModelLayout

_FIELDS = {"magnitude": "use_dora", "bias": "bias", "lora_bias": "lora_bias"}
_FEATURES = {"magnitude": "DoRA", "bias": "trained biases", "lora_bias": "a bias of lora_B"}


def match_outputs(
    grouped: Grouped, targets: Mapping[str, Target], layout: ModelLayout, config: AdapterConfig
) -> dict[int, dict[int, OutputPlan]]:
    """What changes outputs beside B A, by layer and slice.

    Args:
        grouped: the adapter's tensors.
        targets: what the modules with a lora_A and lora_B are.
        layout: the model.
        config: says which vectors there must be.

    Raises:
        AdapterRejected: FEATURE_UNSUPPORTED, TENSOR_PAIR_MISSING, SHAPE_MISMATCH or WEIGHTS_INVALID.
    """
    _check_config(grouped, config)
    plans: dict[int, dict[int, OutputPlan]] = {}
    for module, target in _all_targets(grouped, targets, layout).items():
        vectors = grouped.vectors[module]
        layer = layout.layers[target.layer]
        _check_layer(module, vectors, layer)
        for index, plan in _slice_plans(vectors, target, layer, config.scale(module)):
            if plans.setdefault(target.layer, {}).setdefault(index, plan) is not plan:
                raise AdapterRejected(
                    Code.WEIGHTS_INVALID,
                    f"{show(layer.slices[index].name)} is changed twice, alone and packed",
                )
    return plans


def _check_config(grouped: Grouped, config: AdapterConfig) -> None:
    """The config and the tensors tell of the same features."""
    flags = {"magnitude": config.dora, "bias": config.bias, "lora_bias": config.lora_bias}
    for module, vectors in grouped.vectors.items():
        for kind, tensor in vectors.items():
            if not flags[kind] or (kind != "bias" and module not in grouped.pairs):
                raise AdapterRejected(
                    Code.WEIGHTS_INVALID,
                    f"{show(tensor.name)} belongs to {_FEATURES[kind]}, which the config does not name",
                    expected=f"{_FIELDS[kind]} in adapter_config.json, and a lora_A and lora_B of the module",
                    hint="restore the config it was trained with",
                )
    for kind in (kind for kind in ("magnitude", "lora_bias") if flags[kind]):
        for module in grouped.pairs:
            if kind not in grouped.vectors.get(module, {}):
                raise AdapterRejected(
                    Code.TENSOR_PAIR_MISSING,
                    f"{show(module)} has no {kind} though {_FIELDS[kind]} is set",
                    hint="save the whole adapter again",
                )


def _all_targets(grouped: Grouped, targets: Mapping[str, Target], layout: ModelLayout) -> dict[str, Target]:
    """The target of every module with a vector; a bias may be that of a module without lora_A and lora_B."""
    more = [module for module in grouped.vectors if module not in targets]
    if not more:
        return {module: targets[module] for module in grouped.vectors}
    try:
        found = find_targets([*targets, *more], layout)
    except AdapterRejected as error:
        raise AdapterRejected(
            Code.FEATURE_UNSUPPORTED,
            "a bias was trained of a module that takes no adapter",
            found=error.reason.found,
            hint="train with bias='lora_only' or bias='none'",
        ) from error
    return {module: found[module] for module in grouped.vectors}


def _check_layer(module: str, vectors: Mapping[str, TensorInfo], layer: Layer) -> None:
    fixed = "magnitude" in vectors or layer.kind is not Kind.LINEAR
    if fixed and layer.no_dora:
        what = "DoRA" if "magnitude" in vectors else "a trained bias"
        raise AdapterRejected(
            Code.FEATURE_UNSUPPORTED,
            f"{what} of {show(module)} is not served here: {layer.no_dora}",
            hint="merge the adapter into the base model, or train it without",
        )


def _slice_plans(
    vectors: Mapping[str, TensorInfo], target: Target, layer: Layer, scale: float
) -> Iterator[tuple[int, OutputPlan]]:
    outs = [layer.slices[index].out_features for index in target.slices]
    for tensor in vectors.values():
        if tensor.shape != (sum(outs),):
            raise AdapterRejected(
                Code.SHAPE_MISMATCH,
                f"{show(tensor.name)} does not fit the model",
                expected=f"shape {[sum(outs)]}",
                found=f"shape {list(tensor.shape)}",
                hint="the adapter may be for another base model",
            )
    for index, out, end in zip(target.slices, outs, accumulate(outs), strict=True):
        yield index, OutputPlan((end - out, end), scale, **vectors)
