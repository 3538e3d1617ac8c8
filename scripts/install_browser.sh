#!/usr/bin/env bash
# Installs what the browser tests need: Debian's Chromium (system-wide, with apt-get, as root) and Playwright (into .venv).
# Without them those tests are skipped, saying so. Run `make setup` first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v chromium >/dev/null; then
  echo "labkit: apt-get install chromium"
  if [ "$(id -u)" -ne 0 ]; then
    echo "labkit: this needs root: run 'sudo apt-get install chromium', then this script again" >&2
    exit 1
  fi
  apt-get update -q
  apt-get install -q -y --no-install-recommends chromium
fi
echo "labkit: pip install playwright (its own browser is not downloaded)"
.venv/bin/python -m pip install -q "playwright>=1.49"
echo "labkit: the browser tests are ready: make test-all"
