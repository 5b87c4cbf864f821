"""Compile a kernel for the processor at hand at first use, and load it.

A library is kept in the cache of `kernel_cache.py` under a name that covers its sources, flags, compiler and processor,
so that no wrong library is ever loaded. It has a C interface, and needs the C library alone: neither libstdc++ nor an
OpenMP library, as it runs in the threads of PyTorch's (`threads.h`).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import logging
import os
import posixpath
import re
import subprocess
import tempfile
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch

from ...private_file import temporary_folder
from ..kernel_cache import NoHome, cache_folder, load_or_compile
from .compiler import BuildError, Compiler, Target, best_target, find_compiler, is_usable, processor

logger = logging.getLogger("vllm.packed_kv")

FLAGS = (
    "-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-fno-threadsafe-statics", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wno-psabi",
)  # fmt: skip
"""Not -ffast-math, as infinities are used; not -fopenmp, as its threads would be a second pool."""
LIBRARIES = ("-Wl,--as-needed", "-lm", "-ldl")
CONSTANTS, LIBRARY = "constants.h", "library.so"
POOL = "GOMP_parallel"
OPENMP = re.compile(r"/lib(gomp|omp|iomp5)\b[^/]*\.so[^/]*$")
COMPILE_SECONDS = 600
LONGEST_LINE = 300


INCLUDE = re.compile(r'^#include "(.*)"$', re.MULTILINE)


class Program(NamedTuple):
    """A source file, by its path in this folder, and its own flags."""

    main: str
    flags: tuple[str, ...] = ()


class _Refused(BuildError):
    """The loader refuses a library: the cache may hold another machine's."""


def load_library(program: Program, constants: str, target: Target | None = None) -> ctypes.CDLL:
    """Return a program compiled with these constants, from the cache or compiled (some seconds). A failed compilation
    is not repeated in this process, though each layer asks.

    Args:
        program: see `Program`.
        constants: C++ text, which the program includes as constants.h.
        target: None: the best of this processor.

    Raises:
        BuildError: there is no compiler, or it fails, or its library cannot be loaded; the message is one line.
    """
    loaded = _load(program, constants, target)
    if isinstance(loaded, BuildError):
        raise loaded
    return loaded


@functools.cache
def _load(program: Program, constants: str, target: Target | None) -> ctypes.CDLL | BuildError:
    _warn_of_one_thread()
    try:
        return _load_or_compile(program, constants, target)
    except BuildError as error:
        return error


def _load_or_compile(program: Program, constants: str, target: Target | None) -> ctypes.CDLL:
    """Raises BuildError."""
    sources = read_sources(program) | {CONSTANTS: constants}
    compiler, target = find_compiler(), target or best_target()
    if not is_usable(target):  # also asks for the permission that AMX may need
        raise BuildError(f"this process cannot use {target.name}: name another target")
    flags = (*FLAGS, *program.flags, *target.flags)
    key = hashlib.sha256(repr((sources, flags, LIBRARIES, compiler, processor_key())).encode()).hexdigest()
    stem = Path(program.main).stem
    name = f"{stem}-{target.name}-{key[:32]}.so"
    compiled = functools.cache(lambda: _compile(program, sources, compiler, flags))
    code = load_or_compile(name, compiled)
    try:
        return _open(stem, code)
    except _Refused as error:
        if compiled.cache_info().currsize:
            raise
        logger.warning("%s of the cache is compiled again: %s", name, error)  # for instance of another C library
        return _open(stem, load_or_compile(name, compiled, again=True))


@functools.cache
def _warn_of_one_thread() -> None:
    """Log if `run_on_threads` of threads.h finds no threads, where PyTorch has several."""
    if torch.get_num_threads() > 1 and not hasattr(ctypes.CDLL(None), POOL):
        logger.warning(
            "kernels in C++ run on one thread instead of %d: no OpenMP library is loaded for all libraries of the "
            "process (%s is not found); start with LD_PRELOAD=%s",
            torch.get_num_threads(), POOL, _openmp_library(),
        )  # fmt: skip


def _openmp_library() -> str:
    """Return the path of PyTorch's OpenMP library, as Linux tells it; else the name of GCC's."""
    with suppress(OSError):
        paths = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
        return next((path for path in paths if OPENMP.search(path)), "libgomp.so.1")
    return "libgomp.so.1"


def processor_key() -> tuple[str, tuple[str, ...]]:
    """Return the machine that a library must match to be loaded: the processor's name and features."""
    name, features = processor()
    return name, tuple(sorted(features))


def read_sources(program: Program) -> dict[str, str]:
    """Return the text of a program's file, and of all that it includes, by path in this folder.

    In the order of paths: a library's name has it, so every process must come to the same one.
    """
    folder, sources, found = resources.files(__package__), {}, [program.main]
    while found:
        path = found.pop()
        sources[path] = folder.joinpath(path).read_text()
        names = INCLUDE.findall(sources[path])
        included = {posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) for name in names}
        found += [other for other in included - set(sources) if posixpath.basename(other) != CONSTANTS]
    return dict(sorted(sources.items()))


def _compile(program: Program, sources: dict[str, str], compiler: Compiler, flags: tuple[str, ...]) -> bytes:
    try:
        with temporary_folder(_otherwise()) as (folder, lock):
            for name, text in sources.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text)
            command = [*compiler.command, *flags, "-I.", program.main, "-o", LIBRARY, *LIBRARIES]
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS,
                env={**os.environ, "LC_ALL": "C"},
                pass_fds=(lock,),  # if a compiler outlives this process, its folder stays
            )  # fmt: skip
            if not done.returncode:
                return (folder / LIBRARY).read_bytes()
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler.version} cannot compile {program.main}: {error}; {_ANOTHER}") from error
    except OSError as error:
        is_of_compiler = str(error.filename).endswith((compiler.command[0], LIBRARY))
        remedy = _ANOTHER if is_of_compiler else _remedy(str(error))
        raise BuildError(f"{compiler.version} cannot compile {program.main}: {error}; {remedy}") from error
    lines = done.stderr.splitlines()
    said = next((line for line in lines if "error" in line), lines[-1] if lines else "it says nothing")
    remedy = _remedy(done.stderr) if any(reason in done.stderr for reason in OF_THE_FOLDER) else _ANOTHER
    raise BuildError(f"{compiler.version} cannot compile {program.main}: {said[:LONGEST_LINE]}; {remedy}")


_ANOTHER = "name another C++ compiler as CXX, for instance g++ 9 or later"
TOO_LARGE = (os.strerror(errno.EFBIG), "File size limit exceeded")
OF_THE_FOLDER = (*TOO_LARGE, *map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EROFS)))
"""Messages of compilers that cannot write their files, in the C locale."""


def _remedy(said: str) -> str:
    """Return the remedy where files cannot be written or loaded. `said`: text of an error or of a compiler."""
    if any(reason in said for reason in TOO_LARGE):
        return "raise the largest size of a file (ulimit -f)"
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        folder = "none"
    return f"name a folder of your own that has room, and whose programs may run, as TMPDIR (now {folder})"


def _otherwise() -> Path | None:
    """Return the folder to compile in where others can change TMPDIR: the cache's, if it is known."""
    with suppress(NoHome):
        return cache_folder()
    return None


def _open(stem: str, code: bytes) -> ctypes.CDLL:
    """Load machine code from memory, so that exactly the checked bytes are loaded, whatever happens to the file. Load
    it from a folder where a machine makes no files in memory, or runs no code from them. Raises BuildError."""
    with suppress(OSError):
        return _open_in_memory(stem, code)
    try:
        with temporary_folder(_otherwise()) as (folder, _):
            path = folder / f"{stem}.so"
            path.write_bytes(code)
            return ctypes.CDLL(str(path))
    except OSError as error:
        kind = BuildError if error.errno else _Refused  # the loader's errors have no number
        raise kind(f"the compiled {stem} cannot be loaded: {error}; {_remedy(str(error))}") from error


def _open_in_memory(stem: str, code: bytes) -> ctypes.CDLL:
    """Raises OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.memfd_create(f"packed_kv-{stem}")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(code)
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")  # stays open: the loader knows libraries by their path
    except OSError:
        os.close(descriptor)
        raise
