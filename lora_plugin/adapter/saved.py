"""Modules that PEFT saves whole (`modules_to_save`): what each is of the model.

How many rows of an embedding or an lm_head are not the base model's only a look at both tells. So the headers
say which they are, and whether they could be served at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Final

from lora_plugin.adapter.checkpoint import TensorInfo
from lora_plugin.adapter.config import AdapterConfig
from lora_plugin.adapter.document import show
from lora_plugin.adapter.pairs import Grouped
from lora_plugin.adapter.plan import SavedPlan
from lora_plugin.adapter.targets import Target, core_name, find_targets
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import Kind, Layer, ModelLayout

_MAX_ELEMENTS: Final = 1 << 22
"""Of a parameter that is read only to see that it is the base model's."""


def match_saved(
    grouped: Grouped, targets: Mapping[str, Target], layout: ModelLayout, config: AdapterConfig
) -> tuple[SavedPlan, ...]:
    """What is to be compared with the base model.

    Args:
        grouped: the adapter's tensors.
        targets: what the modules with a lora_A and lora_B are.
        layout: the model.
        config: says whether modules were saved.

    Raises:
        AdapterRejected: FEATURE_UNSUPPORTED, TENSOR_PAIR_MISSING or SHAPE_MISMATCH.
    """
    if grouped.whole and not config.saved_modules:
        name = next(iter(grouped.whole.values())).name
        raise _unsupported(f"{show(name)} is a whole weight, which modules_to_save does not name")
    layers = _layers(grouped, targets, layout)
    _check_all_saved(config, [layout.layers[index] for index in layers.values()], layout)
    for parameter, index in layers.items():
        layer = layout.layers[index]
        _check_shape(grouped.whole[parameter], layer)
        if layer.no_dora:
            raise _unsupported(f"modules_to_save: {layer.name}: {layer.no_dora}")
        if any(target.layer == index for target in targets.values()) or _has_tokens(parameter, grouped):
            raise _unsupported(f"modules_to_save: {layer.name} is targeted in another way, too")
    for parameter, tensor in grouped.whole.items():
        if parameter not in layers and not (tensor.shape and 0 < prod(tensor.shape) <= _MAX_ELEMENTS):
            raise _unsupported(f"modules_to_save: {show(parameter)} is no embedding and no head")
    return tuple(SavedPlan(tensor, name, layers.get(name)) for name, tensor in grouped.whole.items())


def saved_warnings(saved: Iterable[SavedPlan], layout: ModelLayout) -> tuple[str, ...]:
    """What the headers leave open."""
    return tuple(
        f"{show(plan.values.name)} is compared with the base model when it is loaded: "
        + (
            f"at most {layout.max_rank} of its rows may differ"
            if plan.layer is not None
            else "it must not differ"
        )
        for plan in saved
    )


def _layers(grouped: Grouped, targets: Mapping[str, Target], layout: ModelLayout) -> dict[str, int]:
    """The layer of every weight that is an embedding's, an lm_head's or a classifier's head's."""
    cores = {core_name(layer.name) for layer in layout.layers if layer.kind is not Kind.LINEAR}
    modules = [name.removesuffix(".weight") for name in grouped.whole if name.endswith(".weight")]
    ours = [module for module in modules if core_name(module) in cores]
    found = find_targets([*targets, *ours], layout) if ours else {}
    return {f"{module}.weight": found[module].layer for module in ours}


def _check_all_saved(config: AdapterConfig, saved: list[Layer], layout: ModelLayout) -> None:
    """An embedding or an lm_head that the config names was saved; PEFT would go on with the base model's."""
    for layer in (layer for layer in layout.layers if layer.kind is not Kind.LINEAR):
        names = [name for name in config.saved_modules if layer.name.endswith(name)]
        if names and layer not in saved:
            raise AdapterRejected(
                Code.TENSOR_PAIR_MISSING,
                f"modules_to_save names {show(names[0])}, but its weight is not saved",
                hint="save the whole adapter again",
            )


def _check_shape(tensor: TensorInfo, layer: Layer) -> None:
    shape = (layer.slices[0].in_features, layer.slices[0].out_features)
    shape = shape if layer.kind is Kind.EMBEDDING else shape[::-1]
    if tensor.shape == shape:
        return
    if tensor.shape[1:] == shape[1:] and layer.kind is not Kind.CLASSIFIER:
        raise _unsupported(
            f"modules_to_save: {layer.name} has a resized vocabulary",
            expected=f"{shape[0]} tokens, as the base model",
            found=f"{tensor.shape[0]} tokens",
            hint="resize the base model, save it and serve that; or train without new tokens",
        )
    raise AdapterRejected(
        Code.SHAPE_MISMATCH,
        f"{show(tensor.name)} does not fit the model",
        expected=f"shape {list(shape)}",
        found=f"shape {list(tensor.shape)}",
        hint="the adapter may be for another base model",
    )


def _has_tokens(parameter: str, grouped: Grouped) -> bool:
    module = core_name(parameter.removesuffix(".weight"))
    return any(core_name(other) == module for other in grouped.tokens)


def _unsupported(message: str, **facts: str) -> AdapterRejected:
    hint = "merge the adapter into the base model, or train it without modules_to_save"
    return AdapterRejected(Code.FEATURE_UNSUPPORTED, message, **({"hint": hint} | facts))
