#!/usr/bin/env bash
# Put a Chromium on this machine for `make browser`, unless there is one. Debian and Ubuntu; elsewhere install it yourself.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then
        exit 0
    fi
done
if ! command -v apt-get >/dev/null; then
    echo "make browser needs Chromium on PATH: install it with this system's package manager" >&2
    exit 1
fi
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
$sudo apt-get update -qq
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends chromium >/dev/null
