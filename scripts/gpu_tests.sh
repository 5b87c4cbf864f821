#!/usr/bin/env bash
# The tests that a GPU is for. Parts, all by default: kernels (bytes equal to the CPU's, the kernel suite, offsets past
# 2^31 bytes), selftest (which measures times), engine (graphs, prefill, drafts, hybrids in vLLM), picked (models that
# pick tokens, and Kimi-Linear, in vLLM 0.33.0 on Hopper), memcheck (compute-sanitizer over one case of each kernel).
# Only by name: generations (Triton's kernels on Hopper as GPUs of 8.0 and 8.9 have them: chosen for these, compiled for
# them as far as PTX, which ptxas assembles for Hopper. It proves that their instructions are right, neither how many
# programs fit an SM there nor a speed. The CUDA kernels do not compile for these GPUs).
#
#   gpu_tests.sh [PART...]   where python3 finds vLLM and packed-kv (a virtual environment, or gpu_site.sh's PYTHONPATH)
#   gpu_tests.sh collect     only load engine's tests and check that memcheck's cases exist; needs no GPU
#
# Kernels run in a process for 2 cores, engines in one for 3 and picked in one for 4, each with its share of the tests:
# most of their time is compilation. Memcheck takes one for 2, up to one a case. The parts run one after the other: side
# by side they lack GPU memory. `picked` needs CUTLASS' Python (nvidia-cutlass-dsl, quack-kernels), which pip brings with
# vLLM. PyTorch picks exactly there; PACKED_KV_INDEXER=vllm takes vLLM's indexer, which needs DeepGEMM and nvcc.
set -euo pipefail
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
cd "$(dirname "${BASH_SOURCE[0]}")/.."
parts=("${@:-kernels selftest engine picked memcheck}")
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0} # FlashInfer may be missing; tokens are greedy
memcheck_cases=(
    "tests/kernels/triton/test_store.py::test_bytes[d128-isoquant3]"
    "tests/kernels/triton/test_store.py::test_bytes[d128-turboquant35]"
    "tests/kernels/triton/test_store.py::test_bytes[d80-isoquant3]"
    "tests/kernels/triton/test_decode.py::test_formats[isoquant3]" # rotates the query and merges, too
    "tests/kernels/triton/test_decode.py::test_formats[turboquant35]"
    "tests/kernels/triton/test_decode.py::test_head_dims[isoquant3-80]"
    "tests/kernels/triton/test_decode.py::test_centred_and_scaled_pages[tq4-{'sinks': torch.bfloat16}]"
    "tests/kernels/triton/test_gather.py::test_gathered_tokens_equal_the_pages[isoquant3-96]"
    "tests/kernels/triton/test_gather.py::test_unrotated_vectors_are_the_decoded_ones[tq4-torch.float16]"
    "tests/kernels/triton/test_gather.py::test_combine[inf]"
    "tests/kernels/triton/test_gather.py::test_chunks_and_prefixes[False-{'sliding_window': 24, 'sinks': True}]"
    "tests/kernels/triton/test_ring.py::test_stored_bytes_equal_the_reference[isoquant4-64]"
    "tests/kernels/triton/test_ring.py::test_decode[{}]" # schedules the recent window, too
    # The CUDA kernel: a warp's splits, blocks that combine their warps and each other, the recent window, lse.
    "tests/kernels/cuda/test_cuda_decode.py::test_pages[{'name': 'isoquant4', 'seq_lens': (1, 37, 300)}]"
    "tests/kernels/cuda/test_cuda_decode.py::test_pages[{'name': 'turboquant25', 'head_dim': 64, 'kv_heads': 1, 'group': 2, 'query_lens': (4, 0, 3), 'seq_lens': (9, 5, 70), 'block_size': 32, 'splits': Grid(warps=1, blocks=5, is_final=False)}]"
    "tests/kernels/cuda/test_cuda_decode.py::test_recent_tokens[{'name': 'turboquant35', 'head_dim': 64, 'kv_heads': 1, 'requests': ((90, 0), (60, 50), (20, 20)), 'query_lens': (3, 2, 1), 'recent': 16, 'group': 2, 'block_size': 4}]"
    # Heads of 256: blocks that combine their warps, and undo V's rotation in turns; a warp's splits.
    "tests/kernels/cuda/test_cuda_decode.py::test_recent_tokens[{'name': 'turboquant35', 'head_dim': 256, 'kv_heads': 1, 'group': 6, 'recent': 64, 'requests': ((700, 0), (60, 50), (20, 20)), 'query_lens': (1, 1, 1), 'splits': Grid(warps=4, blocks=2, is_final=True)}]"
    "tests/kernels/cuda/test_cuda_decode.py::test_pages[{'name': 'turboquant25', 'head_dim': 256, 'kv_heads': 1, 'group': 2, 'query_lens': (2, 0, 1), 'seq_lens': (9, 5, 70), 'block_size': 32, 'splits': Grid(warps=1, blocks=5, is_final=False)}]"
    "tests/kernels/cuda/test_cuda_decode.py::test_recent_tokens[{'name': 'tq4', 'head_dim': 256, 'kv_heads': 1, 'group': 6, 'recent': 200, 'query_lens': (4, 1, 2), 'requests': ((700, 0), (60, 50), (20, 20)), 'splits': Grid(warps=4, blocks=2, is_final=True)}]" # a team
    # 64 columns: two warpgroups (isoquant4), and a team of warps (isoquant3). 32 columns of a warp, with the recent window.
    "tests/kernels/cuda/test_cuda_decode.py::test_pages[{'name': 'isoquant4', 'kv_heads': 1, 'group': 16, 'query_lens': (4, 3), 'seq_lens': (1100, 70), 'splits': Grid(warps=4, blocks=2, is_final=True)}]"
    "tests/kernels/cuda/test_cuda_decode.py::test_pages[{'name': 'isoquant3', 'kv_heads': 1, 'group': 16, 'query_lens': (4, 3), 'seq_lens': (2100, 70), 'splits': Grid(warps=4, blocks=2, is_final=True)}]"
    "tests/kernels/cuda/test_cuda_decode.py::test_recent_tokens[{'name': 'turboquant25', 'kv_heads': 1, 'group': 16, 'query_lens': (2, 1), 'recent': 64, 'requests': ((700, 0), (60, 50)), 'splits': Grid(warps=1, blocks=12, is_final=False)}]"
    # 24 columns, and 48 of a team.
    "tests/kernels/cuda/test_cuda_decode.py::test_pages[{'name': 'turboquant35', 'head_dim': 64, 'kv_heads': 1, 'group': 6, 'query_lens': (4, 1, 0), 'seq_lens': (1100, 40, 9), 'splits': Grid(warps=4, blocks=3, is_final=True)}]"
    "tests/kernels/cuda/test_cuda_decode.py::test_pages[{'name': 'isoquant3', 'kv_heads': 1, 'group': 12, 'query_lens': (4, 3), 'seq_lens': (700, 70), 'splits': Grid(warps=4, blocks=2, is_final=False)}]"
    # Latent attention: store, gather, both decode kernels, the recent window.
    "tests/kernels/triton/test_latent_ring.py::test_decodes_equal_the_reference[triton-turboquant25-96-32-8-40-drafts behind hits]"
    "tests/kernels/triton/test_latent_ring.py::test_decodes_equal_the_reference[cuda-tq4-512-64-16-16-drafts]"
    "tests/kernels/triton/test_latent.py::test_stored_bytes_equal_the_codecs[tq4-512-64-16]"
    "tests/kernels/triton/test_latent.py::test_gathered_rows_equal_the_pages[96-32-isoquant3-16]"
    "tests/kernels/triton/test_latent.py::test_decodes_equal_the_reference[turboquant25-96-32-3-16-3-drafts]"
    "tests/kernels/triton/test_latent_rows.py::test_stored_bytes_equal_the_codecs[turboquant25-16]"
    "tests/kernels/triton/test_latent_rows.py::test_gathered_rows_equal_the_pages[tq3-8]"
    "tests/kernels/triton/test_latent_rows.py::test_picks_are_split[130]"
    "tests/kernels/cuda/test_cuda_picks.py::test_decode[{'name': 'tq4', 'heads': 20, 'counts': (130, 200, 7), 'holes': 0.3, 'rope_bits': 8, 'block_size': 16}]"
    "tests/kernels/cuda/test_cuda_picks.py::test_decode[{'name': 'turboquant35', 'heads': 64, 'counts': (150, 64), 'rope_bits': 8, 'holes': 0.3}]"
    "tests/kernels/cuda/test_cuda_latent.py::test_decode[{'name': 'turboquant25', 'heads': 4, 'seq_lens': (200, 70, 0, 5), 'query_lens': (3, 0, 1, 2), 'block_size': 16}]"
    # A mixed step from tables on the device, and as it is replayed.
    "tests/kernels/test_fused_prefix.py::test_graphs[decodes-turboquant25-64-ring]"
    "tests/kernels/test_fused_prefix.py::test_a_graph_replays_other_batches"
    "tests/kernels/test_fused_prefix.py::test_windows_and_sinks[37-True-ring-graph]"
    "tests/kernels/cuda/test_cuda_prefix.py::test_recent_tokens_of_prefixes[{'name': 'tq4', 'head_dim': 256, 'group': 6, 'kv_heads': 4, 'chunks': (50, 17), 'prefixes': (3000, 700), 'recent': 64}]"
    "tests/kernels/test_merge_lse.py::test_lse[{'seq_lens': (0, 37, 1700), 'kernel': 'cuda', 'splits': Grid(warps=2, blocks=3, is_final=True)}]"
)

engine_tests=(tests/engine/test_{on_cuda,mixed_on_cuda,latent_on_cuda,hybrids,drafts,capacity,images}.py)
picked_tests=(tests/engine/test_{sparse,hy4,kimi}_on_cuda.py)
sleep_tests=tests/engine/test_sleep_on_cuda.py # alone on the card: they read how much of its memory is free

run_pytest() { python3 -m pytest -q --tb=short -p no:cacheprovider "$@"; }

# A job runs in the background, and prints what it has written, in a file of its name in $logs, when it ends.
declare -A jobs=()
start() {
    local name=$1
    shift
    {
        local code=0
        "$@" >"$logs/$name" 2>&1 || code=$?
        cat "$logs/$name"
        exit "$code"
    } &
    jobs[$name]=$!
}
# Waits for jobs. Fails if one has failed.
finish() {
    local name code=0
    for name in "$@"; do wait "${jobs[$name]}" || code=1; done
    return "$code"
}

# One process for so many cores, but at least one and at most so many.
processes() {
    local count=$(($(nproc) / $1))
    count=$((count < $2 ? count : $2))
    echo $((count > 1 ? count : 1))
}
# in_processes COUNT ARGUMENTS... splits the tests that pytest collects for the arguments over so many processes. An option
# with its value comes first. (pytest-xdist's workers ended before their first test on two machines of three.)
in_processes() {
    local count=$1 name="tests.${#jobs[@]}" options=() part names=()
    shift
    if ! run_pytest --collect-only "$@" >"$logs/$name.said" 2>&1; then
        cat "$logs/$name.said"
        return 1
    fi
    grep '^tests/.*::' "$logs/$name.said" >"$logs/$name"
    if [[ ${1:-} == --* ]]; then options=("$1" "$2"); fi
    split -e -n "r/$count" "$logs/$name" "$logs/$name."
    for part in "$logs/$name."[a-z][a-z]; do
        start "$(basename "$part").log" run_pytest "${options[@]}" "@$part"
        names+=("$(basename "$part").log")
    done
    finish "${names[@]}"
}

kernels() {
    # CI runs what needs no GPU.
    in_processes "$(processes 2 24)" tests/codecs/test_cuda.py tests/attention/test_sparse_steps.py tests/kernels --ignore=tests/kernels/{test_compile.py,test_compile_latent.py,test_copies.py,test_counts.py,test_triton_3_6.py,cpu}
}

# Triton's kernels alone, then in layers, whose variants and grids go by the generation.
generations() {
    local capability code=0
    for capability in 8.0 8.9; do
        echo "-- as a GPU of compute capability $capability"
        in_processes "$(processes 2 24)" --as-capability "$capability" tests/kernels/test_older_gpu.py tests/kernels/triton tests/kernels/test_{block_bias,key_widths,latent_layer,latent_shares,merge_lse,shares,step_launches,value_means}.py || code=1
    done
    return "$code"
}

selftest() { run_pytest tests/selftest/test_selftest_on_cuda.py; }

engine() {
    local code=0
    in_processes "$(processes 3 12)" "${engine_tests[@]}" || code=1
    run_pytest "$sleep_tests" && return "$code"
}

picked() {
    in_processes "$(processes 4 4)" "${picked_tests[@]}"
}

# Without PyTorch's caching every tensor is an allocation of its own, so a step out of it is seen. Calls that fail are no
# errors: cuda-bindings, which the CUDA kernel is loaded with, asks the driver for functions that it may not have.
checked() {
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool memcheck --report-api-errors no --error-exitcode 9 \
        python3 -m pytest -q --tb=short -p no:cacheprovider "$@"
}

memcheck() {
    local sanitizer processes i k cases names=()
    processes=$(processes 2 "${#memcheck_cases[@]}")
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1 || true)
    if [[ -z $sanitizer ]]; then
        echo "gpu_tests.sh: no memcheck: compute-sanitizer is neither on PATH nor in /usr/local/cuda*/bin" >&2
        return 1
    fi
    for ((i = 0; i < processes; i++)); do
        cases=()
        for ((k = i; k < ${#memcheck_cases[@]}; k += processes)); do cases+=("${memcheck_cases[k]}"); done
        names+=("memcheck.$i")
        start "memcheck.$i" checked "${cases[@]}"
    done
    finish "${names[@]}"
}

# Two runs: both folders have a `test_latent.py`.
collect() { run_pytest --collect-only "${engine_tests[@]}" "${picked_tests[@]}" "$sleep_tests" && run_pytest --collect-only "${memcheck_cases[@]}"; }

if [[ ${parts[*]} != collect ]] && ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_tests.sh: PyTorch sees no CUDA device" >&2
    exit 1
fi
for part in ${parts[*]}; do
    if [[ ! $part =~ ^(kernels|selftest|engine|picked|memcheck|generations|collect)$ ]]; then
        echo "gpu_tests.sh: no part '$part': kernels, selftest, engine, picked, memcheck, generations or collect" >&2
        exit 2
    fi
done
failed=()
for part in ${parts[*]}; do
    echo "== $part"
    "$part" || failed+=("$part")
done
if ((${#failed[@]})); then
    echo "gpu_tests.sh: failed: ${failed[*]}" >&2
    exit 1
fi
