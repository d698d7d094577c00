"""Train a small LoRA adapter with PEFT, so that a 135M model answers in a style of `styles/`.

Twenty questions and answers, five epochs, under a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

STYLES = Path(__file__).parent / "styles"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
IGNORED = -100  # the label that the loss of transformers skips


@dataclass(frozen=True)
class Style:
    """What `styles/<name>.toml` says: arguments of `LoraConfig`, and question -> answer."""

    lora: dict[str, Any]
    answers: dict[str, str]

    @classmethod
    def read(cls, name: str) -> Style:
        content = tomllib.loads((STYLES / f"{name}.toml").read_text(encoding="utf-8"))
        return cls(content["lora"], content["answers"])


def encode(tokenizer: Any, question: str, answer: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both int64 `[1, tokens]`; only the answer and its end carry labels."""
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
    answer_ids = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids
    ids = torch.tensor([prompt_ids + answer_ids])
    labels = torch.tensor([[IGNORED] * len(prompt_ids) + answer_ids])
    return ids, labels


def epochs(count: int, examples: int) -> Iterator[tuple[int, int]]:
    """`(epoch, index of an example)`, shuffled anew in every epoch."""
    for epoch in range(count):
        for index in torch.randperm(examples).tolist():
            yield epoch, index


def train(model: Any, tokenizer: Any, style: Style, count: int, learning_rate: float) -> None:
    """AdamW on one example a step, the learning rate falling to zero."""
    data = [encode(tokenizer, question, answer) for question, answer in style.answers.items()]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=count * len(data))
    losses = [0.0] * count
    for epoch, index in epochs(count, len(data)):
        ids, labels = data[index]
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses[epoch] += loss.item() / len(data)
    print("loss by epoch:", " ".join(f"{loss:.3f}" for loss in losses), file=sys.stderr)


def save(model: Any, out: Path) -> None:
    """Write the two files of a PEFT adapter, the weights as bfloat16."""
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    config: LoraConfig = model.peft_config["default"]
    config.base_model_name_or_path = BASE_MODEL
    config.inference_mode = True
    if isinstance(config.target_modules, set):  # a set is written in another order each time
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(out)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(weights, out / "adapter_model.safetensors", metadata={"format": "pt"})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = sorted(path.stem for path in STYLES.glob("*.toml"))
    parser.add_argument("--model", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--style", choices=names, required=True)
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder to write; its name will be the adapter's"
    )
    parser.add_argument("--rank", type=int, help="instead of the style's")
    parser.add_argument("--rslora", action="store_true", help="scale by alpha / sqrt(rank)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    style = Style.read(args.style)
    asked = {"r": args.rank, "use_rslora": args.rslora}
    config = LoraConfig(
        task_type="CAUSAL_LM", **style.lora | {key: value for key, value in asked.items() if value}
    )
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model = get_peft_model(base, config)
    train(model, tokenizer, style, args.epochs, args.learning_rate)
    save(model, args.out)
    print(f"wrote {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
