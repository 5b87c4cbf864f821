#!/usr/bin/env bash
# Build the source distribution and, out of it, the wheel, and check their metadata: scripts/release.sh [DIR]
# DIR is dist by default. tests/release says what has to be in them, and installs the wheel.
set -euo pipefail
# shellcheck source=scripts/tools_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/tools_env.sh"
out=${1:-$REPO/dist}
"$TOOLS/bin/python" -m build --no-isolation --outdir "$out" "$REPO" >&2
"$TOOLS/bin/twine" check --strict "$out"/*.whl "$out"/*.tar.gz
