#!/usr/bin/env bash
# Lint, types, tests and the docs site; arguments go to pytest (scripts/test.sh tests/codecs/test_codecs.py -k 3bit).
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
    # Kernels in a process of their own, beside the others, as each uses one core: Triton's interpreter is for the
    # kernels under test, not for vLLM's.
    kernel_log=$(mktemp)
    trap 'kill $(jobs -p) 2>/dev/null || true; wait; cat "$kernel_log"; rm -f "$kernel_log"' EXIT
    trap 'exit 130' INT
    "$bin/python" -m pytest tests/kernels >"$kernel_log" 2>&1 &
    failed=0
    "$bin/python" -m pytest tests --ignore=tests/kernels --durations=15 || failed=1
    wait $! || failed=1
    cat "$kernel_log"
    : >"$kernel_log"
    ((!failed))
fi
if ((!$#)); then
    say "docs"
    PACKED_KV_PYTHON=$bin/python scripts/docs.sh
fi
say "packed-kv-patch verify"
"$bin/packed-kv-patch" verify "${verify[@]}"
say "all passed"
