#!/usr/bin/env bash
# Tests the CPU kernels for ARM (NEON) on another processor: qemu runs Python and PyTorch for aarch64, and a cross
# compiler builds the kernels. Results are compared with the references of the same tests as on x86.
#
#   neon_test.sh FOLDER [PYTEST ARGUMENT...]   FOLDER keeps what is downloaded (1.5 GB)
#
# Needs Debian or Ubuntu with qemu-user-static and g++-aarch64-linux-gnu, and Python 3.11 of Debian 12 for aarch64, which
# it unpacks into FOLDER. About 15 minutes of a core.
set -euo pipefail
folder=$(realpath -m "${1:?neon_test.sh: name a folder for what is downloaded}")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for program in qemu-aarch64-static aarch64-linux-gnu-g++; do
    if ! command -v "$program" >/dev/null; then
        echo "neon_test.sh: no $program: apt install qemu-user-static g++-aarch64-linux-gnu" >&2
        exit 2
    fi
done
python_packages=(python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)
libraries=(libc6 libstdc++6 libgcc-s1 zlib1g libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libexpat1 libgomp1
    libuuid1 libncursesw6 libtinfo6 libreadline8 libcrypt1 libdb5.3 libnsl2 libtirpc3)
wheels=(torch==2.10.0 numpy==2.4.6 sympy==1.14.0 mpmath==1.4.1 networkx==3.6.1 jinja2==3.1.6 markupsafe==3.0.4
    filelock==4.3.1 fsspec==2026.9.0 typing_extensions==4.16.0 pytest==9.2.0 pluggy==1.7.0 iniconfig==2.3.1
    packaging==26.4 setuptools==80.10.2 pygments==2.21.0)

if [[ ! -e $folder/done ]]; then
    mkdir -p "$folder"/{lists/partial,debs,wheels,root/proc,site}
    apt=(apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State::Lists=$folder/lists")
    "${apt[@]}" update
    (cd "$folder/debs" && "${apt[@]}" download "${python_packages[@]}" "${libraries[@]}")
    for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder/root"; done
    # The processor that qemu is: without this file, programs read of the one they run on.
    printf 'processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n\n' >"$folder/root/proc/cpuinfo"
    platforms=()
    for version in 28 27 17; do platforms+=(--platform "manylinux_2_${version}_aarch64"); done
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.11 --implementation cp \
        "${platforms[@]}" --platform manylinux2014_aarch64 -d "$folder/wheels" "${wheels[@]}"
    for wheel in "$folder"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$folder/site"; done
    touch "$folder/done"
fi
(($#)) || set -- tests/kernels/cpu/test_cpu_{store,gather,vectors,latents,latent_decode,decode}.py
exec qemu-aarch64-static -L "$folder/root" -E PYTHONPATH="$folder/site:overlay:tests/support" \
    -E CXX=aarch64-linux-gnu-g++ -E PACKED_KV_CACHE="$folder/cache" -E OMP_NUM_THREADS=1 \
    "$folder/root/usr/bin/python3.11" -m pytest -p without_vllm -p no:cacheprovider -q "$@"
