#!/usr/bin/env bash
# The tests of the operator's page drive Chromium; where it can be installed, it is.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium ..." >&2
    if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; then
        exit 0
    fi
fi
echo "no Chromium: the tests of the page are skipped (Debian and Ubuntu: apt-get install chromium)" >&2
