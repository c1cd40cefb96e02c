#!/usr/bin/env bash
# Installs Debian's Chromium, for tests of the viewer. Playwright drives it, and brings no browser of its own.
#
#   chromium.sh [--if-possible]   needs root and apt; with the option a failure is a warning, and the tests are skipped
set -Eeuo pipefail

install() {
    command -v apt-get >/dev/null || { echo "needs Debian or Ubuntu (apt-get)" && return 1; }
    [ "$(id -u)" = 0 ] || { echo "needs root to install the package chromium" && return 1; }
    export DEBIAN_FRONTEND=noninteractive
    local command=(apt-get install -y -q --no-install-recommends -o "DPkg::Lock::Timeout=300" chromium)
    "${command[@]}" >/dev/null 2>&1 && return 0
    apt-get update -q >/dev/null 2>&1 || true
    "${command[@]}" 2>&1 | tail -n 20
}

for name in chromium chromium-headless-shell chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
said=$(install 2>&1) || true
if command -v chromium >/dev/null; then exit 0; fi
if [ "${1:-}" = --if-possible ]; then
    echo "WARNING: no Chromium here, the viewer's browser tests are SKIPPED: $said" >&2
    exit 0
fi
echo "ERROR: $said" >&2
exit 1
