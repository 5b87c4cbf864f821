#!/usr/bin/env bash
# Lint, types and tests; arguments go to pytest (scripts/test.sh tests/test_codecs.py -k 3bit).
# --verify-patches as the first argument also checks the patches against the pinned wheels (a download of 1 GB).
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$REPO"
verify=(--lint)
if [[ ${1:-} == --verify-patches ]]; then
    verify=()
    shift
fi
bin=$VENV/bin
say "ruff"
"$bin/ruff" check .
say "mypy"
"$bin/mypy"
say "pytest"
"$bin/python" -m pytest "$@"
say "packed-kv-patch verify"
"$bin/packed-kv-patch" verify "${verify[@]}"
say "all passed"
