#!/usr/bin/env bash
# Makes the environment of the tools that need no vLLM (requirements-tools.txt): sourced by docs.sh and release.sh,
# which then use "$TOOLS/bin". It lies in .venv-tools in the repository, or where PACKED_KV_TOOLS says.
set -euo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TOOLS=${PACKED_KV_TOOLS:-$REPO/.venv-tools}
PYTHON=${PACKED_KV_PYTHON:-python3}

if ! cmp -s "$REPO/requirements-tools.txt" "$TOOLS/requirements.txt"; then
    "$PYTHON" -m venv --clear "$TOOLS"
    pins=$REPO/requirements-tools.txt
    "$TOOLS/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps -r "$pins" >&2
    cp "$pins" "$TOOLS/requirements.txt"
fi
