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
if (($#)); then
    "$bin/python" -m pytest "$@"
else
    "$bin/python" -m pytest tests --ignore=tests/kernels
    # In a process of its own: Triton's interpreter is for the kernels under test, not for vLLM's.
    "$bin/python" -m pytest tests/kernels
fi
say "packed-kv-patch verify"
"$bin/packed-kv-patch" verify "${verify[@]}"
say "all passed"
