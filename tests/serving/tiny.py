"""A tiny random model with a byte-level tokenizer, and PEFT adapters for it: real formats, made quickly."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 259
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def make_model(target: Path, *, seed: int = 0, tie: bool = False) -> Path:
    """Write a 2-layer Llama of hidden size 256, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=tie,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        # Wide enough that the next token depends on all that came before.
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).save_pretrained(target)
    tokenizer().save_pretrained(target)
    return target


def make_classifier(target: Path, labels: int) -> Path:
    """Write a 2-layer Llama with a head of so many labels, float32; one makes it a reranker."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        num_labels=labels,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        initializer_range=0.08,
    )
    LlamaForSequenceClassification(config).save_pretrained(target)
    tokenizer().save_pretrained(target)
    return target


def make_classifier_adapter(target: Path, model: Path, *, seed: int, rank: int = 8) -> Path:
    """Save a random adapter as PEFT does for a classifier: with the head, which is trained whole."""
    torch.manual_seed(seed)
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(ALL_LINEAR), task_type="SEQ_CLS")
    base = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    peft_model = get_peft_model(base, lora)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.3 / rank**0.5 if "_B" in name else 0.06)
    peft_model.save_pretrained(target)
    return target


def class_logits(model: Path, adapter: Path | None, prompt: Sequence[int]) -> torch.Tensor:
    """float32 [labels], by transformers with PEFT."""
    network: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        network = PeftModel.from_pretrained(network, adapter)
    with torch.no_grad():
        logits: torch.Tensor = network.eval()(torch.tensor([list(prompt)])).logits[0]
    return logits


def make_moe(target: Path) -> Path:
    """Write a 2-layer Mixtral of four experts, float32."""
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        initializer_range=0.08,
    )
    MixtralForCausalLM(config).save_pretrained(target)
    tokenizer().save_pretrained(target)
    return target


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and a few special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = _CHAT
    return fast


@lru_cache(maxsize=2)
def base_model(path: Path) -> PreTrainedModel:
    """The model in transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def make_adapter(
    target: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 8,
    targets: Sequence[str] = ALL_LINEAR,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Save a random, non-zero adapter as PEFT does; `target` appears whole, by a rename."""
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=rank, lora_alpha=config.pop("lora_alpha", 2 * rank), target_modules=list(targets), **config
    )
    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), lora)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=strength * 0.3 / rank**0.5 if "_B" in name else 0.06)
    peft_model.to(dtype)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    peft_model.save_pretrained(partial)
    (partial / "README.md").unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def compose(model: Path, weights: Mapping[Path, float], target: Path) -> Path:
    """What PEFT makes of several adapters with "cat", saved as one; returns its folder."""
    network: Any = None
    for folder in weights:
        if network is None:
            base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            network = PeftModel.from_pretrained(base, folder, adapter_name=folder.name)
        else:
            network.load_adapter(folder, adapter_name=folder.name)
    names = [folder.name for folder in weights]
    network.add_weighted_adapter(names, list(weights.values()), "composed", combination_type="cat")
    network.save_pretrained(target, selected_adapters=["composed"])
    return target / "composed"


def logprobs(model: Path, adapter: Path | None, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """The log-probability of each output token, by transformers with PEFT in float32."""
    network: torch.nn.Module = base_model(model)
    if adapter is not None:
        fresh = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        network = PeftModel.from_pretrained(fresh, adapter).eval()
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        logits = network(ids).logits[0].float()
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(output)]
