#!/usr/bin/env bash
# Installs what the browser tests need beside .venv: Debian's Chromium, system-wide, with apt-get, as root.
# Without it those tests are skipped, saying so. `make test-browser` and CI run this script.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then
    echo "labkit: $name is there, nothing to install"
    exit 0
  fi
done
if ! command -v apt-get >/dev/null; then
  echo "labkit: there is no apt-get here: install Chromium or Chrome as this system does it" >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "labkit: this needs root: run 'sudo apt-get install chromium', then this again" >&2
  exit 1
fi
echo "labkit: apt-get install chromium"
apt-get update -q
apt-get install -q -y --no-install-recommends chromium
