"""A random Llama for the CPU benchmark: hidden 2048, 8 layers, bfloat16, a small vocabulary (about 1 GB).

python benchmarks/random_model.py .cache/random-2048
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024


def make_model(target: Path) -> None:
    """Write config, tokenizer and weights, all or nothing."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    partial = target.with_name(target.name + ".partial")
    LlamaForCausalLM(config).save_pretrained(partial)
    tokenizer().save_pretrained(partial)
    partial.rename(target)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for every id: vLLM wants a tokenizer, though prompts come as ids."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="w1", eos_token="w2", unk_token="w0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target", type=Path, help="the folder to write; left alone where there is one")
    target: Path = parser.parse_args().target
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        make_model(target)


if __name__ == "__main__":
    main()
