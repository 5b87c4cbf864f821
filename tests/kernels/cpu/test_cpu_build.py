"""Compiling at first use: which compiler, what is kept and loaded again, and one line for what goes wrong."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from packed_kv.codecs.rotations import ROTATIONS
from packed_kv.formats import CODES, FORMATS
from packed_kv.kernels import cpu, kernel_cache
from packed_kv.kernels.cpu import build, compiler, vectors
from packed_kv.kernels.cpu.build import Program, load_library
from packed_kv.kernels.cpu.compiler import BuildError, Compiler, NoCompiler, find_compiler
from packed_kv.kernels.cpu.constants import constants_header, integer_unit
from packed_kv.kernels.cpu.decode import LATENTS, PAIRS
from packed_kv.kernels.cpu.layer import PAGES
from packed_kv.layout import latent_layout, page_layout

ONE_LINE = re.compile(r"[^\n]+")
TINY = Program("tiny.cpp")
SOURCE = '#include "constants.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PACKED_KV_CACHE", str(folder))
    monkeypatch.setattr(build, "read_sources", lambda program: {program.main: SOURCE})
    kernel_cache._warn_once.cache_clear()
    for cached in (build._load, compiler._find, compiler.processor):
        cached.cache_clear()
    return folder


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    caches = build._load, compiler._find, compiler.processor  # before a test puts something else in their place
    yield
    for cached in caches:
        cached.cache_clear()


def answer(number: int) -> int:
    return load_library(TINY, f"constexpr int ANSWER = {number};").answer()


def program(folder: Path, name: str, script: str) -> Path:
    """An executable."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def error_of(call: Callable[[], object]) -> str:
    """The one line of the BuildError that a call raises."""
    with pytest.raises(BuildError) as raised:
        call()
    assert ONE_LINE.fullmatch(str(raised.value)), str(raised.value)
    return str(raised.value)


def counting_compiler(folder: Path) -> Path:
    """A compiler that keeps a line for each file that it compiles."""
    return program(folder, "counting", f'case "$1" in --version) ;; *) echo x >> {folder}/calls ;; esac\nexec c++ "$@"')


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_a_library_is_compiled_once_and_never_mistaken(cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path)))
    assert (answer(3), answer(4), answer(3)) == (3, 4, 3)
    build._load.cache_clear()
    assert (answer(3), calls(tmp_path), len(os.listdir(cache))) == (3, 2, 2)
    monkeypatch.setattr(build, "processor", lambda: ("another", frozenset()))
    build._load.cache_clear()
    assert (answer(3), calls(tmp_path)) == (3, 3)
    monkeypatch.setattr(build, "find_compiler", lambda: find_compiler()._replace(version="another"))
    build._load.cache_clear()
    assert (answer(3), calls(tmp_path)) == (3, 4)


def test_a_damaged_library_is_compiled_again(cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path)))
    assert answer(3) == 3
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    build._load.cache_clear()
    assert (answer(3), calls(tmp_path)) == (3, 2)


def test_a_folder_that_cannot_be_made_costs_time_alone(cache: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACKED_KV_CACHE", str(tmp_path / "file" / "cache"))
    assert answer(3) == 3


def test_the_files_of_a_program_have_one_order() -> None:
    """A library's name has them: in the order of a set, each process compiled its own."""
    for program in (PAIRS, LATENTS, PAGES):
        files = list(build.read_sources(program))
        assert files == sorted(files) and {program.main, "layout/rotation.h"} <= {*files}


def _answer_in_a_process(barrier, results) -> None:
    build.read_sources = lambda program: {program.main: SOURCE}
    barrier.wait(60)
    results.put(answer(5))


def test_two_processes_at_once(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_answer_in_a_process, args=(barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [5, 5]
    for process in processes:
        process.join(60)
    (file,) = cache.iterdir()
    assert file.name.startswith("tiny-") and answer(5) == 5


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/c++ -m64")
    assert "CXX=/no/such/c++ -m64: there is no such program" in error_of(find_compiler)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoCompiler, match="apt install g\\+\\+, or pip install ziglang"):
        find_compiler()


def test_compilers_by_name_then_ziglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    zig = [sys.executable, "-m", "ziglang", "c++"]
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: name == "ziglang")
    monkeypatch.setattr(compiler, "_version", " ".join)
    compiler._find.cache_clear()
    assert find_compiler() == (tuple(zig), " ".join(zig))
    for name in ("clang++", "g++", "c++"):
        program(tmp_path, name, "exit 0")
        compiler._find.cache_clear()
        assert find_compiler().command == (name,)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo broken >&2; exit 3", "--version: broken"),
        ("exit 0", "--version: it ended with 0"),
        ('[ "$1" = --version ] && echo mycc 1.0 && exit; echo x.cpp: error: no >&2; exit 1', "mycc 1.0 cannot compile"),
        ('[ "$1" = --version ] && echo mycc 1.0 && exit; exit 1', "mycc 1.0 cannot compile tiny.cpp: it says nothing"),
    ],
)
def test_a_compiler_that_fails(cache: Path, tmp_path: Path, monkeypatch, script: str, said: str) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "bad", script)))
    line = error_of(lambda: answer(3))
    assert said in line and "as CXX" in line
    assert not cache.exists() or not any(cache.iterdir())


def test_what_fails_is_not_tried_again(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f'[ "$1" = --version ] && echo mycc 1.0 && exit; echo x >> {tmp_path}/calls; exit 1'
    monkeypatch.setenv("CXX", str(program(tmp_path, "bad", script)))
    assert error_of(lambda: answer(3)) == error_of(lambda: answer(3)) and calls(tmp_path) == 1


def test_a_compiler_that_writes_no_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '[ "$1" = --version ] && echo mycc 1.0 && exit; echo text > library.so'
    monkeypatch.setenv("CXX", str(program(tmp_path, "bad", script)))
    assert "cannot be loaded" in error_of(lambda: answer(3))


def test_a_machine_that_makes_no_files_in_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As seccomp and systemd deny memfd_create: a library is loaded from a folder."""

    def denied(name: str) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", denied)
    assert answer(3) == 3


def test_files_that_may_not_be_large(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As `ulimit -f` has it: neither the compiler nor this process can write the library. To compile what the cache has
    would not help."""
    assert answer(3) == 3
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        build._load.cache_clear()
        kept, compiled = (error_of(lambda number=number: answer(number)) for number in (3, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "ulimit -f" in kept and "ulimit -f" in compiled and "cannot compile tiny.cpp" in compiled
    assert "compiled again" not in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written(cache: Path, tmp_path: Path, monkeypatch, number: int) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(Path, "write_text", full)
    line = error_of(lambda: answer(3))
    assert f"{tmp_path}/packed_kv-" in line and f"as TMPDIR (now {tmp_path})" in line


def test_a_folder_that_is_not_there(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    line = error_of(lambda: answer(3))
    assert f"{tmp_path}/gone/packed_kv-" in line and f"as TMPDIR (now {tmp_path}/gone)" in line


def test_a_compiler_whose_folder_is_full(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "tiny.cpp:1: fatal error: error writing to x.s: No space left on device"
    script = f'[ "$1" = --version ] && echo mycc 1.0 && exit; echo "{said}" >&2; exit 1'
    monkeypatch.setenv("CXX", str(program(tmp_path, "full", script)))
    line = error_of(lambda: answer(3))
    assert said in line and "as TMPDIR" in line and "as CXX" not in line


def test_a_compiler_that_writes_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path, "bad", "echo mycc 1.0")))
    line = error_of(lambda: answer(3))
    assert "library.so" in line and "as CXX" in line


def test_a_library_of_the_cache_that_cannot_be_loaded(cache: Path, tmp_path: Path, monkeypatch) -> None:
    """Its digest is right, but it is for instance of another C library: it is compiled again, once."""
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path)))
    assert answer(3) == 3
    (file,) = cache.iterdir()
    kernel_cache.load_or_compile(file.name, lambda: b"of another machine", again=True)
    for _ in range(2):
        build._load.cache_clear()
        assert (answer(3), calls(tmp_path)) == (3, 2)


def test_a_processor_without_long_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "processor", lambda: ("old", frozenset({"sse2"})))
    assert "neither AVX2 nor NEON" in error_of(compiler.best_target)


@pytest.mark.parametrize(
    ("features", "target"),
    [
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx_vnni", "avx2_vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx_vnni", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512vbmi", "avx512_vbmi"),
        ("asimd fp", "neon"),
    ],
)
def test_targets(monkeypatch: pytest.MonkeyPatch, features: str, target: str) -> None:
    monkeypatch.setattr(compiler, "processor", lambda: ("", frozenset(features.split())))
    assert compiler.best_target().name == target


AMX = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512vbmi amx_tile amx_bf16"


@pytest.mark.parametrize(("reason", "target"), [(None, "amx"), ("no", "avx512_vbmi")])
def test_amx_where_it_is_permitted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str | None, target: str
) -> None:
    compiler._warn_of_amx.cache_clear()
    monkeypatch.setattr(compiler, "processor", lambda: ("", frozenset(AMX.split())))
    monkeypatch.setattr(compiler, "amx_refusal", lambda: reason)
    assert [compiler.best_target().name, compiler.best_target().name] == [target] * 2
    assert [record.getMessage().rsplit(": ")[-1] for record in caplog.records] == [reason] * (reason is not None)
    compiler._warn_of_amx.cache_clear()


DENIED = f"""
import ctypes, struct
from packed_kv.kernels.cpu import compiler

compiler.processor = lambda: ("", frozenset("{AMX}".split()))

def step(code, true, false, number):
    return struct.pack("HBBI", code, true, false, number)

# Load the system call; arch_prctl? Load its first argument; a request for permission? EPERM, else allow.
steps = [
    step(0x20, 0, 0, 0), step(0x15, 0, 3, compiler.ARCH_PRCTL), step(0x20, 0, 0, 16),
    step(0x15, 0, 1, compiler.REQUEST_PERMISSION), step(0x06, 0, 0, 0x00050001), step(0x06, 0, 0, 0x7FFF0000),
]
code = ctypes.create_string_buffer(b"".join(steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
library = ctypes.CDLL(None, use_errno=True)
assert not library.prctl(38, 1, 0, 0, 0) and not library.prctl(22, 2, program), ctypes.get_errno()
print(compiler.best_target().name)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter has the number of a system call of x86-64")
def test_a_sandbox_that_denies_amx() -> None:
    """On any processor of x86-64, which is taken for one with AMX: one line, and AVX-512."""
    asked = subprocess.run([sys.executable, "-c", DENIED], capture_output=True, text=True, check=True)
    assert asked.stdout.split() == ["avx512_vbmi"]
    reason = f"Linux does not permit it (arch_prctl: {os.strerror(errno.EPERM)})"
    assert asked.stderr.count("without AMX") == 1 and reason in asked.stderr, asked.stderr


def test_a_compiler_that_does_not_know_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor that has it, where Linux permits it."""
    old = Compiler((str(program(tmp_path, "old", "echo 'error: unrecognized option' >&2; exit 1")),), "old 1")
    monkeypatch.setattr(compiler, "find_compiler", lambda: old)
    monkeypatch.setattr(compiler.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=lambda *_: 0))
    assert compiler.amx_refusal.__wrapped__() == "old 1 does not compile for it: error: unrecognized option"


def test_levels_are_integers() -> None:
    assert {bits: integer_unit(code) for bits, code in CODES.items()} == {5: 1 / 32, 4: 1 / 128, 3: 1 / 32, 2: 1 / 4}


def test_a_library_needs_the_c_library_alone() -> None:
    """Neither libstdc++, which hosts may have in other versions, nor an OpenMP library, whose threads would be more."""
    fmt = FORMATS["tq4"]
    library = load_library(PAIRS, constants_header(page_layout(fmt, 64), fmt.rotation))
    content = Path(library._name).read_bytes()
    needed = set(re.findall(rb"lib[\w+.-]+\.so[.\d]*", content))
    assert needed <= {b"libc.so.6", b"libm.so.6", b"libdl.so.2"} and isinstance(library, ctypes.CDLL), needed


def test_a_library_is_compiled_in_the_cache_where_others_can_change_tmpdir(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    (tmp_path / "bin").mkdir()
    script = f'pwd >> {tmp_path}/where; exec c++ "$@"'
    monkeypatch.setenv("CXX", str(program(tmp_path / "bin", "mycc", script)))
    assert answer(3) == 3
    assert (tmp_path / "where").read_text().splitlines()[-1].startswith(f"{cache}/packed_kv-")
    assert len(os.listdir(cache)) == 1 and not os.listdir(shared)
    cache.chmod(0o777)
    assert "others can rename what is in it" in error_of(lambda: answer(4))


def test_a_rotation_that_is_not_in_cpp_does_not_compile() -> None:
    """Neither is it none, nor another."""
    for program in (PAIRS, LATENTS, PAGES, vectors.PROGRAM):
        layout = latent_layout(FORMATS["tq4"], 96, 32) if program is LATENTS else page_layout(FORMATS["tq4"], 64)
        assert "octonion" in error_of(lambda: load_library(program, constants_header(layout, "octonion")))  # noqa: B023
    assert set(ROTATIONS) == set(cpu.ROTATIONS) == {fmt.rotation for fmt in FORMATS.values()}
