"""Tiny random models, one of each kind that people have, and how transformers reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from quantised import fake_int8, rounded_to_int4, write_awq, write_gptq, write_int8
from tiny import VOCAB, tokenizer
from torch import nn

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    # Wide enough that the next token depends on all that came before.
    "initializer_range": 0.08,
}
_MULTI_QUERY: Final = {"multi_query": True, "num_key_value_heads": ..., "head_dim": ...}
_ROTARY: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION: Final = _ROTARY[:4]
_IGNORE: Final[Callable[[nn.Module], nn.Module]] = lambda model: model  # noqa: E731


@dataclass(frozen=True)
class Architecture:
    """One model, and what of it adapters are trained on.

    Attributes:
        config: the transformers config's class.
        settings: what differs from the usual sizes; `...` leaves one out.
        targets: the last parts of the names of the linear layers that are targeted.
        within: a regular expression of what comes before them, where the name alone says too little.
        embedding: the token embedding's name.
        head: lm_head, tied to the embedding or not; None for a model that pools.
        auto: how transformers loads it.
        flags: flags of the server.
        refused: the code by feature, of what is refused by name.
        write: writes what is served, given the model in transformers; as it is when left out.
        compute: makes the model in transformers compute as the served one does.
        pools: whether it answers with an embedding of the prompt.
        pooled: which token's output the embedding is.
        dtype: what it is served in.
        tolerance: of a log-probability, or of an embedding's element, where it is served in float32.
        representative: whether it is part of `make test`.
        note: what a reader of the table should know.
    """

    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = _ROTARY
    within: str = ""
    embedding: str = "embed_tokens"
    head: str | None = "lm_head"
    auto: str = "AutoModelForCausalLM"
    flags: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    write: Callable[[nn.Module, Path], None] | None = None
    compute: Callable[[nn.Module], nn.Module] = _IGNORE
    pools: bool = False
    pooled: int = -1
    dtype: str = "float32"
    tolerance: float = 2e-4
    representative: bool = False
    note: str = ""

    def make(self, folder: Path) -> Path:
        """Write the model, float32 unless it is quantised, with a byte-level tokenizer."""
        torch.manual_seed(7)
        settings = {key: value for key, value in {**_SIZES, **self.settings}.items() if value is not ...}
        config = getattr(transformers, self.config)(**settings)
        model = getattr(transformers, self.auto).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Zero as they are made: a served model that forgot them would not be noticed.
                if name.endswith("bias"):
                    parameter.normal_(std=0.1)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        return folder

    def serve(self, folder: Path) -> Path:
        """The folder that is served."""
        if self.write is None:
            return folder
        target = folder.with_name(f"{folder.name}-served")
        self.write(self.load(folder), target)
        tokenizer().save_pretrained(target)
        return target

    def load(self, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model in transformers."""
        model: nn.Module = getattr(transformers, self.auto).from_pretrained(folder, dtype=torch.float32)
        return self.compute(model.eval()).to(dtype)


ARCHITECTURES: Final = {
    "Llama": Architecture("LlamaConfig", {"tie_word_embeddings": False}),
    "Mistral, sliding window": Architecture("MistralConfig", {"sliding_window": 8}),
    "Qwen2, biases, tied": Architecture("Qwen2Config", {"tie_word_embeddings": True}),
    "Qwen3, untied": Architecture("Qwen3Config", {"tie_word_embeddings": False}),
    "Gemma 3, tied": Architecture(
        "Gemma3TextConfig",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 32,
        },
    ),
    "Gemma 2, no head": Architecture(
        "Gemma2Config",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": None,
        },
        note="without attn_logit_softcapping, which vLLM's CPU attention computes coarsely",
    ),
    "Phi-3, packed": Architecture(
        "Phi3Config",
        {"pad_token_id": 258, "original_max_position_embeddings": 1024},
        targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ),
    "OPT": Architecture(
        "OPTConfig",
        {"ffn_dim": 192, "word_embed_proj_dim": 128, "init_std": 0.08},
        targets=("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
        refused={"all biases": "feature-unsupported"},
    ),
    "GPT-BigCode, fused c_attn": Architecture(
        "GPTBigCodeConfig",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024, "n_inner": 192, **_MULTI_QUERY},
        targets=("c_attn", "c_proj", "c_fc"),
        embedding="wte",
        refused={"all biases": "feature-unsupported"},
    ),
    "Mixtral": Architecture(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        targets=_ATTENTION,
        refused={"all-linear": "feature-unsupported"},
        note="all-linear includes the experts (`target_parameters`)",
    ),
    "Qwen2-MoE, shared expert": Architecture(
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "decoder_sparse_step": 1,
        },
        targets=_ATTENTION,
        representative=True,
    ),
    "Idefics3, its text model": Architecture(
        "Idefics3Config",
        {
            "text_config": {**_SIZES, "model_type": "llama"},
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "image_token_id": 1,
            "scale_factor": 2,
        },
        within=".*text_model",
        auto="AutoModelForImageTextToText",
        flags=("--language-model-only",),
        refused={"all-linear": "tensor-unknown", "all biases": "feature-unsupported"},
        note="all-linear, and all biases, include the vision tower, which is not there with "
        "`--language-model-only`",
    ),
    "Qwen3 embedding": Architecture(
        "Qwen3Config",
        {"tie_word_embeddings": True, "architectures": ["Qwen3ForCausalLM"]},
        head=None,
        auto="AutoModel",
        flags=("--runner", "pooling", "--convert", "embed"),
        refused={"trained tokens": "feature-unsupported"},
        pools=True,
        representative=True,
        note="trained tokens may be those of a tied lm_head, which it has not",
    ),
    "BERT embedding": Architecture(
        "BertConfig",
        {"architectures": ["BertModel"]},
        targets=("query", "key", "value", "dense"),
        within=".*encoder",
        embedding="word_embeddings",
        head=None,
        auto="AutoModel",
        flags=("--runner", "pooling"),
        refused={
            "all-linear": "tensor-unknown",
            "all biases": "feature-unsupported",
            "trained tokens": "feature-unsupported",
        },
        pools=True,
        pooled=0,
        note="all-linear includes the pooler, which vLLM leaves out; all biases include those of layer norms",
    ),
    "Llama, bfloat16": Architecture("LlamaConfig", {"tie_word_embeddings": False}, dtype="bfloat16"),
    "Llama, float16": Architecture("LlamaConfig", {"tie_word_embeddings": False}, dtype="float16"),
    "Llama, int4 (GPTQ), bfloat16": Architecture(
        "LlamaConfig",
        {"tie_word_embeddings": False},
        write=write_gptq,
        compute=rounded_to_int4,
        dtype="bfloat16",
    ),
    "Llama, int4 (AWQ), float16": Architecture(
        "LlamaConfig",
        {"tie_word_embeddings": False},
        write=write_awq,
        compute=partial(rounded_to_int4, shifted=True),
        dtype="float16",
    ),
    "Llama, int8 (compressed-tensors)": Architecture(
        "LlamaConfig",
        {"tie_word_embeddings": False},
        write=write_int8,
        compute=fake_int8,
        tolerance=0.05,
        note="against the same rounding of weights and activations; one activation rounded otherwise is 0.01",
    ),
}
