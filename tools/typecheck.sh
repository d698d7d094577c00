#!/usr/bin/env bash
# Type-check the package as it is installed (mypy does not see through an editable install's mapping),
# and the benchmarks and examples over it.
set -euo pipefail

target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
"$PYTHON" -m pip --disable-pip-version-check --quiet install --no-deps --target "$target" .
rm -rf build
cd "$target"
check() { "$PYTHON" -m mypy --config-file "$OLDPWD/pyproject.toml" --cache-dir "$OLDPWD/.mypy_cache" "$@"; }
MYPYPATH="$target" check -p lora_plugin
MYPYPATH="$target:$OLDPWD/benchmarks" check "$OLDPWD"/benchmarks/*.py "$OLDPWD"/examples/*.py "$OLDPWD"/examples/hooks/*.py
