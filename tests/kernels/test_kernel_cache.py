"""Compiled kernels on disk: damage heals, and nobody else's files are loaded."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkout import REPO
from packed_kv.kernels import kernel_cache

NAME = "decode-0123.cubin"
CODE = bytes(range(256)) * 40


class Compiler:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return CODE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "cache" / "packed_kv"
    monkeypatch.setenv("PACKED_KV_CACHE", str(path))
    kernel_cache._warn_once.cache_clear()
    before = os.umask(0)
    yield path
    os.umask(before)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(kernel_cache, "logger", logging.getLogger("packed_kv_test"))  # vLLM's does not propagate
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_kernel_is_compiled_once(folder: Path, lines: Callable[[], list[str]]) -> None:
    compiler = Compiler()
    for _ in range(3):
        assert kernel_cache.load_or_compile(NAME, compiler) == CODE
    assert compiler.calls == 1 and not lines()
    assert os.listdir(folder) == [NAME]
    assert (mode(folder), mode(folder / NAME)) == (0o700, 0o600)


def test_a_warm_cache_is_read_without_a_folder_for_temporary_files(
    folder: Path, lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    compiler = Compiler()
    kernel_cache.load_or_compile(NAME, compiler)
    kernel_cache._sweep_once.cache_clear()
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    for _ in range(2):
        assert kernel_cache.load_or_compile(NAME, compiler) == CODE
    assert compiler.calls == 1 and not lines()
    assert kernel_cache._sweep_once.cache_info().misses == 1


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    """Put another kernel's file in its place."""
    kernel_cache.load_or_compile("decode-4567.cubin", lambda: b"another")
    shutil.move(path.with_name("decode-4567.cubin"), path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(CODE),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        flip,
        swap,
    ],
    ids=["empty", "without digest", "cut", "longer", "one bit", "another kernel's"],
)
def test_a_damaged_file_is_compiled_again_once(
    folder: Path, lines: Callable[[], list[str]], damage: Callable[[Path], None]
) -> None:
    compiler = Compiler()
    kernel_cache.load_or_compile(NAME, compiler)
    damage(folder / NAME)
    for _ in range(2):
        assert kernel_cache.load_or_compile(NAME, compiler) == CODE
    assert compiler.calls == 2
    assert lines() == [f"{folder / NAME} is damaged; the kernel is compiled again"]


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def link(path: Path) -> None:
    shutil.move(path, path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda path: path.parent.chmod(0o770),
            r"others can write .*packed_kv \(mode 770\); run: chmod go-w .*packed_kv, or name a folder of your own by "
            "PACKED_KV_CACHE",
        ),
        (lambda path: path.parent.chmod(0o707), r"others can write .*packed_kv \(mode 707\)"),
        (lambda path: path.chmod(0o620), rf"others can write .*{NAME} \(mode 620\); delete it"),
        (lambda path: path.chmod(0o602), rf"others can write .*{NAME}"),
        (fifo, rf"{NAME} is not a regular file; delete it"),
        (directory, rf"{NAME} is not a regular file; delete it"),
        (link, rf"{NAME} is not a regular file; delete it"),
    ],
    ids=["folder of a group", "folder of all", "file of a group", "file of all", "FIFO", "directory", "link"],
)
def test_what_others_can_write_is_not_loaded(
    folder: Path, lines: Callable[[], list[str]], change: Callable[[Path], None], reason: str
) -> None:
    """The planted file has the right digest, and a start says so in one line however many kernels it asks for."""
    kernel_cache.load_or_compile(NAME, lambda: b"planted")
    change(folder / NAME)
    before = sorted(os.listdir(folder))
    for _ in range(2):
        assert kernel_cache.load_or_compile(NAME, Compiler()) == CODE
    assert sorted(os.listdir(folder)) == before, "nothing is written there"
    (line,) = lines()
    assert line.startswith("compiled kernels are not loaded from the cache, and compiled at each start: ")
    assert re.search(reason, line), line


def test_what_another_user_owns_is_not_loaded(
    folder: Path, lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_cache.load_or_compile(NAME, lambda: b"planted")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert kernel_cache.load_or_compile(NAME, Compiler()) == CODE
    (line,) = lines()
    assert f"{folder} belongs to user {owner}, not to {owner + 1}; name a folder of your own by PACKED_KV_CACHE" in line


def test_a_file_of_another_user_is_not_loaded(folder: Path, lines: Callable[[], list[str]]) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file away")
    kernel_cache.load_or_compile(NAME, lambda: b"planted")
    os.chown(folder / NAME, 1234, -1)
    assert kernel_cache.load_or_compile(NAME, Compiler()) == CODE
    (line,) = lines()
    assert f"{folder / NAME} belongs to user 1234" in line


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupted_write_leaves_nothing(
    folder: Path, lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fail)
        assert kernel_cache.load_or_compile(NAME, Compiler()) == CODE
    assert os.listdir(folder) == []
    (line,) = lines()
    assert f"cannot be kept in {folder}" in line and "No space left" in line
    assert kernel_cache.load_or_compile(NAME, Compiler()) == CODE
    assert os.listdir(folder) == [NAME]


def test_a_folder_that_cannot_be_made_costs_time_alone(
    tmp_path: Path, lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_cache._warn_once.cache_clear()
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACKED_KV_CACHE", str(tmp_path / "file"))
    assert kernel_cache.load_or_compile(NAME, Compiler()) == CODE
    (line,) = lines()
    assert "compiled at each start" in line and str(tmp_path / "file") in line


def test_errors_of_the_compiler_are_raised(folder: Path) -> None:
    def fails() -> bytes:
        raise RuntimeError("NVRTC: no")

    with pytest.raises(RuntimeError, match="NVRTC: no"):
        kernel_cache.load_or_compile(NAME, fails)
    assert os.listdir(folder) == []


@pytest.fixture
def no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry in /etc/passwd."""

    def unknown(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "PACKED_KV_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_without_a_home_folder(no_home: None, lines: Callable[[], list[str]], tmp_path: Path, monkeypatch) -> None:
    """Kernels are compiled at each start; one line says so, and the remedy is one."""
    compiler = Compiler()
    for _ in range(2):
        assert kernel_cache.load_or_compile(NAME, compiler) == CODE
    assert compiler.calls == 2
    (line,) = lines()
    assert "compiled at each start: there is no home folder for ~/.cache/packed_kv (HOME is not set" in line
    assert line.endswith(kernel_cache.ANOTHER) and kernel_cache.ANOTHER in kernel_cache.why_not_kept()
    monkeypatch.setenv("PACKED_KV_CACHE", str(tmp_path / "named"))
    for _ in range(2):
        assert kernel_cache.load_or_compile(NAME, compiler) == CODE
    assert compiler.calls == 3 and not kernel_cache.why_not_kept()


def test_the_home_folder_is_found_by_its_sign(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PACKED_KV_CACHE", "~/kernels")
    assert kernel_cache.cache_folder() == tmp_path / "kernels"
    monkeypatch.setenv("PACKED_KV_CACHE", "~nobody-of-this-name/kernels")
    with pytest.raises(kernel_cache.NoHome, match="~nobody-of-this-name/kernels"):
        kernel_cache.cache_folder()


def test_what_cannot_be_written_has_a_remedy(
    folder: Path, lines: Callable[[], list[str]], tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACKED_KV_CACHE", str(tmp_path / "file"))
    assert kernel_cache.load_or_compile(NAME, Compiler()) == CODE
    (line,) = lines()
    assert str(tmp_path / "file") in line and line.endswith(kernel_cache.ANOTHER)


def test_a_kernel_is_compiled_again_and_replaced(folder: Path) -> None:
    kernel_cache.load_or_compile(NAME, lambda: b"of another machine")
    assert kernel_cache.load_or_compile(NAME, Compiler(), again=True) == CODE
    assert kernel_cache.load_or_compile(NAME, lambda: b"not called") == CODE


def test_no_path_ends_a_start_where_there_is_no_home_folder() -> None:
    """`Path.expanduser` and `Path.home` raise RuntimeError; `os.path.expanduser` returns the path as it is."""
    rooms = ("overlay", "calibration", "quality", "scripts", "vllm_patches", "examples", "benchmarks")
    files = [file for room in rooms for file in sorted((REPO / room).rglob("*.py"))]
    found = [str(file) for file in files if re.search(r"(?<!os\.path)\.expanduser\(|Path\.home\(", file.read_text())]
    assert len(files) > 200 and not found, found
