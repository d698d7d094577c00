"""Where trained tokens go: rows of the embedding, and of an lm_head, that PEFT saved whole."""

from __future__ import annotations

from collections.abc import Mapping

from lora_plugin.adapter.config import AdapterConfig
from lora_plugin.adapter.document import show, show_some
from lora_plugin.adapter.pairs import Grouped
from lora_plugin.adapter.plan import TokenPlan
from lora_plugin.adapter.targets import Target, find_targets
from lora_plugin.errors import AdapterRejected, Code
from lora_plugin.layout import Kind, Layer, ModelLayout, max_rank_hint


def match_tokens(
    grouped: Grouped, targets: Mapping[str, Target], layout: ModelLayout, config: AdapterConfig
) -> dict[int, TokenPlan]:
    """The tokens of each embedding or lm_head that has some; a tied lm_head has those of the embedding.

    Args:
        grouped: the adapter's tensors.
        targets: what the modules with a lora_A and lora_B are.
        layout: the model.
        config: says which tokens.

    Raises:
        AdapterRejected: FEATURE_UNSUPPORTED, WEIGHTS_INVALID, TENSOR_PAIR_MISSING, CONFIG_INVALID,
            RANK_TOO_LARGE or SHAPE_MISMATCH.
    """
    _check_saved(grouped, config)
    found = find_targets([*targets, *grouped.tokens], layout) if grouped.tokens else {}
    plans: dict[int, TokenPlan] = {}
    for module, values in grouped.tokens.items():
        plan = TokenPlan(values, _tokens_of(module, config))
        plans[found[module].layer] = plan
    for index in [i for i in plans if layout.layers[i].kind is Kind.EMBEDDING]:
        head = _head(layout)
        if layout.layers[head].tied:
            plans.setdefault(head, plans[index])
    for index, plan in plans.items():
        _check_plan(plan, layout.layers[index], layout.max_rank)
        if any(target.layer == index for target in targets.values()):
            raise _unsupported(layout.layers[index].name, "it has a lora_A and lora_B, too")
    return plans


def _check_saved(grouped: Grouped, config: AdapterConfig) -> None:
    if grouped.tokens and not config.tokens:
        raise AdapterRejected(
            Code.WEIGHTS_INVALID,
            f"{show(next(iter(grouped.tokens.values())).name)} belongs to trainable tokens, "
            "which the config does not name",
            expected="trainable_token_indices in adapter_config.json",
            hint="restore the config it was trained with",
        )
    if config.tokens and not grouped.tokens:
        raise AdapterRejected(
            Code.TENSOR_PAIR_MISSING,
            "trainable_token_indices is set, but no rows of tokens are saved",
            hint="save the whole adapter again",
        )


def _tokens_of(module: str, config: AdapterConfig) -> tuple[int, ...]:
    if config.tokens.keys() == {""}:
        return config.tokens[""]
    names = [name for name in config.tokens if f".{module}".endswith(f".{name}")]
    if len(names) != 1:
        raise AdapterRejected(
            Code.CONFIG_INVALID,
            f"trainable_token_indices does not say which tokens of {show(module)} were trained",
            found=show_some(list(config.tokens)),
        )
    return config.tokens[names[0]]


def _head(layout: ModelLayout) -> int:
    """The lm_head's index: only it can tell whether it is tied."""
    for index, layer in enumerate(layout.layers):
        if layer.kind is Kind.LM_HEAD:
            return index
    raise _unsupported("the embedding", "the model's lm_head, which may be tied to it, takes no adapter")


def _check_plan(plan: TokenPlan, layer: Layer, max_rank: int) -> None:
    part = layer.slices[0]
    vocabulary, width = part.in_features, part.out_features
    if layer.kind is Kind.LM_HEAD:
        vocabulary, width = width, vocabulary
    if layer.kind is Kind.LINEAR or layer.no_dora:
        raise _unsupported(layer.name, layer.no_dora or "it is no embedding")
    if plan.values.shape != (len(plan.tokens), width):
        raise AdapterRejected(
            Code.SHAPE_MISMATCH,
            f"{show(plan.values.name)} does not fit the model and the config",
            expected=f"shape {[len(plan.tokens), width]}",
            found=f"shape {list(plan.values.shape)}",
        )
    if max(plan.tokens) >= vocabulary:
        raise _unsupported(layer.name, f"token {max(plan.tokens)} is not in its vocabulary of {vocabulary}")
    if len(plan.tokens) > max_rank:
        raise AdapterRejected(
            Code.RANK_TOO_LARGE,
            "more tokens were trained than the server's maximal rank: each takes a row",
            expected=f"at most {max_rank} tokens",
            found=f"{len(plan.tokens)} tokens",
            hint=max_rank_hint(len(plan.tokens)),
        )


def _unsupported(name: str, reason: str) -> AdapterRejected:
    return AdapterRejected(
        Code.FEATURE_UNSUPPORTED,
        f"trainable tokens of {name} are not served here: {reason}",
        hint="merge the adapter into the base model, or train it without",
    )
