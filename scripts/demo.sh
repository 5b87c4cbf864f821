#!/usr/bin/env bash
# Runs a model under every KV-cache dtype and prints a table; arguments go to demo.py (--help lists them).
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
exec "$VENV/bin/python" "$REPO/scripts/demo.py" "$@"
