"""Compile a kernel for the processor at hand at first use, and load it.

A library is kept in the cache of `kernel_cache.py` under a name that has its sources, flags, compiler and processor in
it, so that it is never loaded where another was meant. It has a C interface, and needs the C library alone: neither
libstdc++ nor an OpenMP library, as it runs in the threads of PyTorch's (`threads.h`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from ...private_file import temporary_folder
from ..kernel_cache import load_or_compile
from .compiler import BuildError, Compiler, Target, best_target, find_compiler, processor

FLAGS = (
    "-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-threadsafe-statics", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-psabi",
)  # fmt: skip
"""Not -ffast-math, as infinities are used; not -fopenmp, as its threads would be a second pool."""
LIBRARIES = ("-Wl,--as-needed", "-lm", "-ldl")
CONSTANTS = "constants.h"
COMPILE_SECONDS = 600
LONGEST_LINE = 300


class Program(NamedTuple):
    """A source file, those that it includes, and its own flags."""

    main: str
    headers: tuple[str, ...]
    flags: tuple[str, ...] = ()


SIMD = ("simd.h", "simd_avx512.h", "simd_avx2.h", "simd_neon.h")


@functools.cache
def load_library(program: Program, constants: str, target: Target | None = None) -> ctypes.CDLL:
    """Return a program compiled with these constants, from the cache or compiled (some seconds).

    Args:
        program: see `Program`.
        constants: C++ text, which the program includes as constants.h.
        target: None: the best of this processor.

    Raises:
        BuildError: there is no compiler, or it fails; the message is one line.
    """
    sources = read_sources(program) | {CONSTANTS: constants}
    compiler, target = find_compiler(), target or best_target()
    flags = (*FLAGS, *program.flags, *target.flags)
    key = hashlib.sha256(repr((sources, flags, LIBRARIES, compiler, processor_key())).encode()).hexdigest()
    stem = Path(program.main).stem
    code = load_or_compile(f"{stem}-{target.name}-{key[:32]}.so", lambda: _compile(program, sources, compiler, flags))
    return _open(stem, code)


def processor_key() -> tuple[str, tuple[str, ...]]:
    """Return what a library must not be loaded without: the processor's name and features."""
    name, features = processor()
    return name, tuple(sorted(features))


def read_sources(program: Program) -> dict[str, str]:
    """Return the text of a program's files by name."""
    folder = resources.files(__package__)
    return {name: folder.joinpath(name).read_text() for name in (program.main, *program.headers)}


def _compile(program: Program, sources: dict[str, str], compiler: Compiler, flags: tuple[str, ...]) -> bytes:
    with temporary_folder() as (folder, lock):
        for name, text in sources.items():
            (folder / name).write_text(text)
        command = [*compiler.command, *flags, program.main, "-o", "library.so", *LIBRARIES]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS,
                pass_fds=(lock,),  # a compiler that outlives this process keeps its folder
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{compiler.version} cannot compile {program.main}: {error}; {_ANOTHER}") from error
        if done.returncode:
            lines = done.stderr.splitlines()
            said = next((line for line in lines if "error" in line), lines[-1] if lines else "it says nothing")
            raise BuildError(f"{compiler.version} cannot compile {program.main}: {said[:LONGEST_LINE]}; {_ANOTHER}")
        return (folder / "library.so").read_bytes()


_ANOTHER = "name another C++ compiler as CXX, for instance g++ 9 or later"


def _open(stem: str, code: bytes) -> ctypes.CDLL:
    """Load machine code from memory, so that what was checked is what is loaded, whatever becomes of the file."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(f"packed_kv-{stem}")
        with open(descriptor, "wb", closefd=False) as file:
            file.write(code)
        try:
            return ctypes.CDLL(f"/proc/self/fd/{descriptor}")  # stays open: the loader knows libraries by their path
        except OSError:  # a machine that runs no code from such files; it runs it from a folder
            os.close(descriptor)
    with temporary_folder() as (folder, _):
        path = folder / f"{stem}.so"
        path.write_bytes(code)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"the compiled {stem} cannot be loaded: {error}") from error
