#!/usr/bin/env bash
# Type-check the package as it is installed: mypy does not see through an editable install's mapping.
set -euo pipefail

target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
"$PYTHON" -m pip --disable-pip-version-check --quiet install --no-deps --target "$target" .
rm -rf build
cd "$target"
MYPYPATH="$target" "$PYTHON" -m mypy --config-file "$OLDPWD/pyproject.toml" --cache-dir "$OLDPWD/.mypy_cache" -p lora_plugin
