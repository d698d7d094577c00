"""An example of every row of docs/adapters.md: what is done to an adapter as PEFT saved it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adapter_samples import LAYERS, LIMIT, FusedLlama, edit_config, edit_tensors, rename, shard

KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BIAS = KEY.replace("lora_A.weight", "base_layer.bias")
EMBEDDING = "base_model.model.model.embed_tokens"
SAVED = f"{EMBEDDING}.weight"
TOKENS = f"{EMBEDDING}.token_adapter.trainable_tokens_delta"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Change = Callable[[Path], Any]


def config(**changes: Any) -> Change:
    return lambda folder: edit_config(folder, **changes)


def nothing(folder: Path) -> None:
    pass


def truncate(name: str) -> Change:
    def cut(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) - 10])

    return cut


def link_inside(folder: Path) -> None:
    """As Kubernetes mounts a volume: links to a hidden folder."""
    data = folder / "..data"
    data.mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / name).rename(data / name)
        (folder / name).symlink_to(Path("..data") / name)


def link_out(folder: Path) -> None:
    outside = folder.parent.parent / WEIGHTS
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def tensor(key: str, value: torch.Tensor) -> Change:
    return lambda folder: edit_tensors(folder, lambda old: old | {key: value})


def saved_whole(key: str, value: torch.Tensor) -> Change:
    """As one of `modules_to_save`."""

    def change(folder: Path) -> None:
        edit_config(folder, modules_to_save=[".".join(key.split(".")[-3:-1])])
        tensor(key, value)(folder)

    return change


def of_rank(rank: int) -> Change:
    """Config and tensors of another rank."""

    def resized(key: str, old: torch.Tensor) -> torch.Tensor:
        return torch.ones(rank, old.shape[1]) if "lora_A" in key else torch.ones(old.shape[0], rank)

    def change(folder: Path) -> None:
        edit_config(folder, r=rank)
        edit_tensors(folder, lambda old: {key: resized(key, tensor) for key, tensor in old.items()})

    return change


def poison(folder: Path) -> None:
    edit_tensors(folder, lambda old: old | {KEY: old[KEY].clone().fill_(float("nan"))})


# How PEFT trains it, and what happens to the folder afterwards.
SERVED: dict[str, list[tuple[dict[str, Any], Change]]] = {
    "any rank up to `--max-lora-rank`, odd ones too": [({"r": r}, nothing) for r in (1, 5, 64)],
    "`use_rslora`": [({"use_rslora": True}, nothing)],
    "`rank_pattern`, `alpha_pattern`": [
        ({"rank_pattern": {"v_proj": 3, r"layers\.1\..*q_proj": 12}, "alpha_pattern": {"q_proj": 5}}, nothing)
    ],
    "DoRA (`use_dora`), of linear layers, `embed_tokens` and `lm_head`": [
        ({"use_dora": True, "target_modules": "all-linear"}, nothing),
        ({"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]}, nothing),
    ],
    "trained biases (`bias`), of modules that an adapter can target": [
        ({}, lambda folder: (edit_config(folder, bias="all"), tensor(BIAS, torch.ones(32))(folder)))
    ],
    "a bias of lora_B (`lora_bias`)": [({"lora_bias": True}, nothing)],
    "trained tokens (`trainable_token_indices`) of the embedding and lm_head": [
        ({"trainable_token_indices": indices}, nothing)
        for indices in ([1, 5], {"embed_tokens": [1], "lm_head": [2, 3]})
    ],
    "`modules_to_save` of `embed_tokens` and `lm_head`, of which few rows are not the base model's": [
        ({"modules_to_save": modules}, nothing) for modules in (["embed_tokens"], ["embed_tokens", "lm_head"])
    ],
    "some modules or layers only": [
        ({"target_modules": "all-linear"}, nothing),
        ({"target_modules": r".*\.1\.mlp\.(up|down)_proj"}, config(target_modules=...)),
    ],
    "float32, float16, bfloat16 or float64 weights": [
        ({"dtype": getattr(torch, name)}, nothing) for name in ("float32", "float16", "bfloat16", "float64")
    ],
    "`embed_tokens` and `lm_head` as targets": [({"target_modules": ["embed_tokens", "lm_head"]}, nothing)],
    "weights in several files with an index": [({}, shard)],
    "names without `base_model.model.`, or with the adapter's name in them": [
        ({}, lambda folder: rename(folder, lambda key: key.removeprefix("base_model.model."))),
        ({}, lambda folder: rename(folder, lambda key: key.replace(".weight", ".default.weight"))),
    ],
    "names with or without the wrappers of a multimodal model": [
        (
            {},
            lambda folder: rename(
                folder, lambda key: key.replace("model.model.", "model.language_model.model.")
            ),
        )
    ],
    "trained on packed layers (`qkv_proj`, `gate_up_proj`) or on their parts (`q_proj`, ...)": [
        ({"base": FusedLlama(), "target_modules": ["qkv_proj", "gate_up_proj"]}, nothing)
    ],
    "another `base_model_name_or_path`, or none": [
        ({}, config(base_model_name_or_path=name)) for name in ("acme/other", None, ...)
    ],
    "links inside the watched directory, as Kubernetes makes them": [({}, link_inside)],
    "keys of a newer PEFT": [({}, config(of_the_future=[1]))],
}

NOT_WHOLE: dict[str, list[Change]] = {
    "no `adapter_config.json`": [lambda folder: (folder / CONFIG).unlink()],
    "no weights, or not every file of the index": [
        lambda folder: (folder / WEIGHTS).unlink(),
        lambda folder: (shard(folder), next(folder.glob("*-00002-*")).unlink()),
    ],
    "a file shorter than its header says": [truncate(WEIGHTS)],
    "a config that ends in the middle": [truncate(CONFIG)],
}

REFUSED: dict[str, list[Change]] = {
    "another `peft_type` (IA3, AdaLoRA, VeRA, LoHa, LoKr, ...)": [
        config(peft_type=kind) for kind in ("IA3", "ADALORA", "VERA", "LOHA", "LOKR", ...)
    ],
    "`lora_bias` together with `use_dora`, which PEFT refuses too": [config(lora_bias=True, use_dora=True)],
    'a trained bias of a module that takes no adapter (`bias="all"` with layer norms that have one)': [
        lambda folder: (
            edit_config(folder, bias="all"),
            tensor("base_model.model.model.norm.bias", torch.ones(32))(folder),
        )
    ],
    "`use_dora`, `lora_bias` or `trainable_token_indices` without their tensors": [
        config(use_dora=True),
        config(lora_bias=True),
        config(trainable_token_indices=[5]),
    ],
    "magnitudes, biases or rows of tokens that the config does not name": [
        tensor(TOKENS, torch.ones(1, 32)),
        tensor(KEY.replace("lora_A", "lora_magnitude_vector"), torch.ones(32)),
        tensor(KEY.replace("lora_A.weight", "lora_B.bias"), torch.ones(32)),
        tensor(BIAS, torch.ones(32)),
    ],
    "`modules_to_save` of an embedding or lm_head of which more rows differ than `--max-lora-rank`": [
        # With a trained bias two rows less than all there are.
        lambda folder: (
            saved_whole(SAVED, torch.ones(64, 32))(folder),
            edit_config(folder, bias="lora_only"),
            tensor(BIAS, torch.ones(32))(folder),
        )
    ],
    "`modules_to_save` of other modules (norms, heads it lacks) that are not the base model's": [
        saved_whole("base_model.model.model.norm.weight", torch.zeros(32)),
        saved_whole("base_model.model.score.weight", torch.ones(2, 32)),
    ],
    "`modules_to_save` that names an embedding or lm_head whose weight is not saved": [
        config(modules_to_save=["lm_head"])
    ],
    "activated LoRA (`alora_invocation_tokens`)": [config(alora_invocation_tokens=[1])],
    "`layer_replication`": [config(layer_replication=[[0, 1]])],
    "trained tokens of a module that `target_modules` names too, or beyond the vocabulary": [
        lambda folder: (
            edit_config(folder, trainable_token_indices=[5]),
            edit_tensors(
                folder,
                lambda old: (
                    old
                    | {
                        TOKENS: torch.ones(1, 32),
                        f"{EMBEDDING}.lora_embedding_A": torch.ones(8, 64),
                        f"{EMBEDDING}.lora_embedding_B": torch.ones(32, 8),
                    }
                ),
            ),
        ),
        lambda folder: (
            edit_config(folder, trainable_token_indices=[64]),
            tensor(TOKENS, torch.ones(1, 32))(folder),
        ),
    ],
    "`trainable_token_indices` that are no token ids, or not those of the saved module": [
        config(trainable_token_indices=[-1]),
        lambda folder: (
            edit_config(folder, trainable_token_indices={"wte": [5]}),
            tensor(TOKENS, torch.ones(1, 32))(folder),
        ),
    ],
    "`target_parameters`": [config(target_parameters=["experts.gate_up_proj"])],
    "`use_qalora`, `use_bdlora`": [config(use_qalora=True), config(use_bdlora={"nblocks": 2})],
    "`arrow_config`, `kasa_config`, `monteclora_config`, `megatron_config`": [
        config(**{f"{name}_config": {"x": 1}}) for name in ("arrow", "kasa", "monteclora", "megatron")
    ],
    "relative to a changed base (`init_lora_weights` of PiSSA, OLoRA, CorDA, LoftQ)": [
        config(init_lora_weights=name) for name in ("pissa", "olora", "corda", "loftq")
    ],
    "a resized vocabulary": [
        tensor("base_model.model.model.embed_tokens.base_layer.weight", torch.ones(70, 32)),
        saved_whole(SAVED, torch.ones(70, 32)),
    ],
    "modules that take no adapter: MoE experts, vision towers, those outside `--lora-target-modules`": [
        lambda folder: rename(folder, lambda key: key.replace("layers.0.self_attn", "layers.0.experts.0"))
    ],
    "`r` missing, null, zero or negative": [config(r=r) for r in (..., None, 0, -8)],
    "`lora_alpha` missing, zero, negative or not finite": [
        config(lora_alpha=alpha) for alpha in (..., 0, -16, float("inf"))
    ],
    "`r` that is not the tensors' rank": [config(r=4)],
    "a rank above `--max-lora-rank`": [of_rank(128)],
    "a config that is not a JSON object": [lambda folder: (folder / CONFIG).write_text("[]")],
    "a pattern that is no regular expression, or could take too long": [
        config(rank_pattern={key: 8}) for key in ("q_(proj", "(a*)*b")
    ],
    "pickled weights only": [pickled],
    "a Git LFS pointer, or anything else that is not safetensors": [
        lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n")
    ],
    "two adapters in one file": [
        lambda folder: rename(
            folder, lambda key: key.replace(".weight", f".{'a' if 'layers.0' in key else 'b'}.weight")
        )
    ],
    "tensors that the model has no module for: all, some, or layers beyond its last": [
        lambda folder: rename(folder, lambda key: key.replace("self_attn", "attention")),
        lambda folder: rename(folder, lambda key: key.replace("0.self_attn", "0.attention")),
        lambda folder: rename(folder, lambda key: key.replace("layers.0", f"layers.{LAYERS}")),
    ],
    "`lora_A` without `lora_B`": [
        lambda folder: edit_tensors(folder, lambda old: {key: old[key] for key in old if key != KEY})
    ],
    "dimensions that are not the module's": [tensor(KEY, torch.ones(8, 40)), tensor(KEY, torch.ones(8, 16))],
    "int8, float8 and other dtypes": [
        tensor(KEY, torch.ones(8, 32).to(dtype)) for dtype in (torch.int8, torch.float8_e4m3fn)
    ],
    "NaN, infinity, or a value beyond the serving dtype": [poison, tensor(KEY, torch.full((8, 32), 1e5))],
    "a product of A, B and scale, or a bias, magnitude or token's row, above 10,000": [
        lambda folder: edit_tensors(folder, lambda old: {key: old[key] * 1e3 for key in old}),
    ],
    "files above `LORA_PLUGIN_MAX_ADAPTER_BYTES`": [tensor(KEY, torch.ones(8, LIMIT // 32 + 1))],
    "a link that leads out of the watched directory": [link_out],
}

NAMES = {
    "a name outside the grammar": ("-sql", "sql query", "naïve", "a" * 101),
    "a reserved name": ("text", "image", "base"),
}
