#!/usr/bin/env bash
# Installs what is needed beside .venv, system-wide, with apt-get, as root:
#   chromium     for the browser tests
#   bubblewrap   for `labkit course grade` and its tests
# Without them those tests are skipped, with the reason. `make test-browser` and CI run this script.
set -euo pipefail

missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
  missing+=(chromium)
if [ ${#missing[@]} -eq 0 ]; then
  echo "labkit: Chromium and bubblewrap are there, nothing to install"
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "labkit: there is no apt-get here: install ${missing[*]} as this system does it" >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "labkit: this needs root: run 'sudo apt-get install ${missing[*]}', then this again" >&2
  exit 1
fi
echo "labkit: apt-get install ${missing[*]}"
apt-get update -q
apt-get install -q -y --no-install-recommends "${missing[@]}"
