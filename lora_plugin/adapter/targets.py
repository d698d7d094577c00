"""Which layer of the model each module of an adapter is.

Frameworks disagree only in what they wrap around a language model: "model.language_model.layers.0..." in one
is "language_model.model.layers.0..." in another, and "layers.0..." in a third. So names are compared as they
are and, if that does not fit the whole adapter, without the wrappers in front. Names are never matched by
their tail alone: a vision tower's layers must not land on the language model's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lora_plugin.adapter.document import show, show_some
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import ModelLayout

_WRAPPERS: Final = frozenset(
    {
        "base_model",
        "model",
        "language_model",
        "text_model",
        "llm",
        "transformer",
        "bert",
        "roberta",
        "thinker",
        "module",
        "_orig_mod",
        "_fsdp_wrapped_module",
    }
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a module's name stands for in the layout.

    Attributes:
        layer: index in `ModelLayout.layers`.
        slices: indices of the slices: one, or all of them for the name of a packed layer.
    """

    layer: int
    slices: tuple[int, ...]


def find_targets(modules: Iterable[str], layout: ModelLayout) -> dict[str, Target]:
    """The target of every module.

    Raises:
        AdapterRejected: FEATURE_UNSUPPORTED, for a module that exists but takes no adapter; TENSOR_UNKNOWN,
            for modules that the model lacks or that fit in more than one way.
    """
    modules = list(modules)
    targets = _by_name(layout)
    if all(module in targets for module in modules):
        return {module: targets[module] for module in modules}
    by_core: dict[str, list[str]] = defaultdict(list)
    for name in targets:
        by_core[core_name(name)].append(name)
    unknown = [module for module in modules if core_name(module) not in by_core]
    if unknown:
        _refuse_unwrapped(unknown, layout.unwrapped)
        raise _unknown(unknown, len(modules), layout)
    names = {module: _only(module, by_core[core_name(module)]) for module in modules}
    _refuse_clashes(names)
    return {module: targets[name] for module, name in names.items()}


def _by_name(layout: ModelLayout) -> dict[str, Target]:
    targets = {}
    for index, layer in enumerate(layout.layers):
        targets[layer.name] = Target(index, tuple(range(len(layer.slices))))
        targets |= {part.name: Target(index, (i,)) for i, part in enumerate(layer.slices)}
    return targets


def core_name(name: str) -> str:
    """A module's name without the wrappers in front: "layers.0.mlp.up_proj"."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts)


def _only(module: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    raise AdapterRejected(
        Code.TENSOR_UNKNOWN,
        f"the module {show(module)} could be more than one of the model's",
        expected="exactly one",
        found=show_some(names),
        hint="name the tensors as the model does",
    )


def _refuse_clashes(names: Mapping[str, str]) -> None:
    owners: dict[str, str] = {}
    for module, name in names.items():
        if owners.setdefault(name, module) != module:
            raise AdapterRejected(
                Code.TENSOR_UNKNOWN,
                "two modules of the adapter are the same one of the model",
                expected=show(name),
                found=show_some([owners[name], module]),
            )


def _refuse_unwrapped(unknown: Iterable[str], unwrapped: Mapping[str, str]) -> None:
    reasons = {core_name(path): reason for path, reason in unwrapped.items()}
    for module in unknown:
        path = core_name(module)
        while path:
            if path in reasons:
                raise AdapterRejected(
                    Code.FEATURE_UNSUPPORTED,
                    f"the module {show(module)} takes no adapter: {reasons[path]}",
                    hint="train without this target",
                )
            path = path.rpartition(".")[0]


def _unknown(unknown: Sequence[str], total: int, layout: ModelLayout) -> AdapterRejected:
    count = "none" if len(unknown) == total else f"only {total - len(unknown)}"
    return AdapterRejected(
        Code.TENSOR_UNKNOWN,
        f"{count} of the adapter's {total} modules exist in the model",
        expected=_describe(layout),
        found=show_some(unknown),
        hint="the adapter may be for another base model",
    )


def _describe(layout: ModelLayout) -> str:
    names = list(_by_name(layout))
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in names)
    numbers = [int(found[1]) for name in names if (found := re.search(r"\.(\d+)\.", name))]
    layers = f"layers {min(numbers)}..{max(numbers)}, " if numbers else ""
    example = f", such as {names[0]}" if names else ""
    return f"{layers}modules {', '.join(leaves)}{example}"
