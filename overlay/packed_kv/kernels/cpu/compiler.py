"""Find a C++ compiler and what this machine's processor can do."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("vllm.packed_kv")

REMEDY = "apt install g++, or pip install ziglang"
NAMES = ("c++", "g++", "clang++")
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""The system call on x86-64, ARCH_REQ_XCOMP_PERM, and XFEATURE_XTILEDATA."""
INTRINSICS = ("_tile_zero(0)", "_tile_dpbf16ps(0, 1, 2)")
VERSION_SECONDS = 300
"""ziglang's first call builds its libraries, which takes minutes."""


class BuildError(RuntimeError):
    """A kernel cannot be compiled; the message is one line with the reason and the remedy."""


class NoCompiler(BuildError):
    """There is no C++ compiler."""


class Compiler(NamedTuple):
    """A command that compiles C++, and the first line of its version text."""

    command: tuple[str, ...]
    version: str


AMX = ("amx_tile", "amx_bf16")


class Target(NamedTuple):
    """A kind of processor: compiler flags, and names of the features that its vectors need, as Linux calls them."""

    name: str
    features: tuple[str, ...]
    flags: tuple[str, ...]


def _x86(name: str, *features: str) -> Target:
    spelled = {"avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni", AMX[0]: "amx-tile", AMX[1]: "amx-bf16"}
    return Target(name, features, tuple(f"-m{spelled.get(feature, feature)}" for feature in features))


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
TARGETS = (
    _x86("amx", *_AVX512, "avx512_vnni", "avx512vbmi", *AMX),
    _x86("avx512_vbmi", *_AVX512, "avx512_vnni", "avx512vbmi"),
    _x86("avx512_vnni", *_AVX512, "avx512_vnni"),
    _x86("avx512", *_AVX512),
    _x86("avx2_vnni", *_AVX2, "avx_vnni"),
    _x86("avx2", *_AVX2),
    Target("neon", ("asimd",), ()),
)
"""Targets, the best first. All are built from the same sources."""


def find_compiler() -> Compiler:
    """Return $CXX, else the first of `NAMES` that is installed, else ziglang's.

    Raises:
        NoCompiler: there is none.
        BuildError: $CXX is not there, or does not say its version.
    """
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find(chosen: str, path: str) -> Compiler:
    if chosen.strip():
        command = tuple(chosen.split())
        if shutil.which(command[0], path=path) is None:
            raise BuildError(f"CXX={chosen}: there is no such program; name a C++ compiler, or unset CXX")
        return Compiler(command, _version(command))
    for name in NAMES:
        if shutil.which(name, path=path) is not None:
            return Compiler((name,), _version((name,)))
    if importlib.util.find_spec("ziglang") is not None:
        command = (sys.executable, "-m", "ziglang", "c++")
        return Compiler(command, _version(command))
    raise NoCompiler(f"there is no C++ compiler ({', '.join(NAMES)}); {REMEDY}")


def _version(command: tuple[str, ...]) -> str:
    try:
        asked = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{' '.join(command)} --version: {error}; name another C++ compiler as CXX") from error
    lines = asked.stdout.splitlines()
    if asked.returncode or not lines:
        said = (asked.stderr.splitlines() or [f"it ended with {asked.returncode}"])[0]
        raise BuildError(f"{' '.join(command)} --version: {said}; name another C++ compiler as CXX")
    return lines[0]


@functools.cache
def processor() -> tuple[str, frozenset[str]]:
    """Return the first processor's name and features, as Linux tells them; elsewhere the name of its kind and, for ARM,
    NEON."""
    machine = platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        text = ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    told = {name.strip(): value.strip() for name, value in fields.items()}
    features = frozenset((told.get("flags") or told.get("Features") or "").split())
    name = " ".join([machine, *(told.get(key, "") for key in ("vendor_id", "cpu family", "model", "model name"))])
    if machine in ("aarch64", "arm64"):
        features |= {"asimd"}
    return name, features


@functools.cache
def amx_refusal() -> str | None:
    """Return why this process must not use AMX, which this processor has, or None. Linux gives the permission to a
    process that asks for it, and to its child processes."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.syscall(ctypes.c_long(ARCH_PRCTL), ctypes.c_long(REQUEST_PERMISSION), ctypes.c_long(TILE_DATA)):
            return f"Linux does not permit it (arch_prctl: {os.strerror(ctypes.get_errno())})"
        return _refused_flags(find_compiler(), target_of("amx"))
    except (AttributeError, OSError) as error:
        return str(error)


def _refused_flags(compiler: Compiler, target: Target) -> str | None:
    """Return the error of a compiler that is older than the processor and does not know its flags, or None."""
    command = [*compiler.command, *target.flags, "-x", "c++", "-fsyntax-only", "-"]
    source = f"#include <immintrin.h>\nvoid f() {{ {'; '.join(INTRINSICS)}; }}\n"
    asked = subprocess.run(
        command, input=source, capture_output=True, text=True, errors="replace", timeout=VERSION_SECONDS
    )
    if not asked.returncode:
        return None
    said = next((line for line in asked.stderr.splitlines() if "error" in line), "it says nothing")
    return f"{compiler.version} does not compile for it: {said}"


def is_usable(target: Target) -> bool:
    """Return whether this processor has a target's features, and this process may use them."""
    is_here = processor()[1].issuperset(target.features)
    return is_here and not (set(AMX) & {*target.features} and _warn_of_amx())


def best_target() -> Target:
    """Return the target that uses most of this processor. Raises BuildError if its vectors are too short."""
    for target in TARGETS:
        if is_usable(target):
            return target
    name, _ = processor()
    raise BuildError(f"this processor ({name.strip()}) has neither AVX2 nor NEON; packed dtypes are served by PyTorch")


@functools.cache
def _warn_of_amx() -> bool:
    """Return whether this process must not use AMX; log why, once."""
    reason = amx_refusal()
    if reason:
        logger.warning("kernels in C++ do without AMX, and take longer over latents: %s", reason)
    return reason is not None


def target_of(name: str) -> Target:
    """Return the target of this name. Raises KeyError."""
    return {target.name: target for target in TARGETS}[name]
