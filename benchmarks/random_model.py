"""A random Llama for the CPU benchmarks: 8 layers, a small vocabulary.

python benchmarks/random_model.py .cache/random-2048
python benchmarks/random_model.py .cache/random-512 --hidden 512 --dtype float32
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024


def make_model(target: Path, hidden: int, dtype: str) -> None:
    """Write config, tokenizer and weights, all or nothing."""
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=8,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype=dtype,
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
    parser.add_argument("--hidden", type=int, default=2048, help="its width, a multiple of 256; 2048 is 1 GB")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    target: Path = arguments.target
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        make_model(target, arguments.hidden, arguments.dtype)


if __name__ == "__main__":
    main()
