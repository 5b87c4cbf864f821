"""`"calibration": "auto"` in a folder of the cache that others can write, or with files and locks that they planted."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from calibration_files import content, write
from packed_kv.calibration_file import load
from packed_kv.private_file import new_name
from packed_kv.settings import self_calibration
from packed_kv.settings.self_calibration import cached_file
from self_calibrating import copies, instead, resolved, settings

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def until_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR of this process, which ends with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmpdir"))
    (tmp_path / "tmpdir").mkdir()
    with contextlib.ExitStack() as stack:
        monkeypatch.setattr(self_calibration, "UNTIL_EXIT", stack)
        yield tmp_path / "tmpdir"
    assert os.listdir(tmp_path / "tmpdir") == []


def full(folder: Path) -> None:
    """Let the cache's file have no place."""
    folder.mkdir(parents=True)
    (folder / cached_file(settings(str(folder.parents[1] / "model"))).name).mkdir()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda cache: cache.parent.touch(), "Not a directory"),
        (lambda cache: [cache.mkdir(parents=True), cache.chmod(0o777)], "others can write {cache} (mode 777)"),
        (lambda cache: [cache.mkdir(parents=True), cache.chmod(0o770)], "others can write {cache} (mode 770)"),
        (full, ".json is not a regular file; delete it"),
    ],
    ids=["no folder", "folder of all", "folder of a group", "no file"],
)
def test_a_cache_that_is_not_this_users_alone_costs_time(
    change: Callable[[Path], object],
    reason: str,
    model: str,
    cache: Path,
    until_exit: Path,
    tmp_path: Path,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine calibrates for itself, whatever others have put there, and one line says why."""
    change(cache)
    if reason.startswith("others"):
        write(cache, content(1, mean=30000.0, version=3)).rename(cache / cached_file(settings(model)).name)
    commands = instead(monkeypatch, copies(write(tmp_path, content(1))))
    path = resolved(settings(model))
    assert len(commands) == 1 and path.parent.parent == until_exit and path.parent.stat().st_mode & 0o777 == 0o700
    assert load(path).version == 1
    told = [line for line in log if "one is made at each start" in line]
    assert len(told) == 1 and reason.format(cache=cache) in told[0]
    assert not list(cache.glob("*.lock")) or change is full


@pytest.fixture
def victim(cache: Path) -> Path:
    """A file of this user's in the cache, to which links lead."""
    cache.mkdir(parents=True, mode=0o700)
    (cache / "victim").write_text("precious")
    return cache / "victim"


def planted(path: Path) -> None:
    path.write_text("precious")
    os.chown(path, 1234, -1)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (planted, "{path} belongs to user 1234"),
        (lambda path: path.symlink_to("victim"), "{path} is not a regular file"),
        (os.mkfifo, "{path} is not a regular file"),
        (lambda path: [path.touch(), path.chmod(0o666)], "others can write {path} (mode 666)"),
    ],
    ids=["another user's", "link", "FIFO", "writable"],
)
def test_a_planted_file_is_not_loaded_but_replaced(
    plant: Callable[[Path], object],
    reason: str,
    model: str,
    victim: Path,
    tmp_path: Path,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if plant is planted and os.geteuid():
        pytest.skip("only root can give a file away")
    path = cached_file(settings(model))
    plant(path)
    commands = instead(monkeypatch, copies(write(tmp_path, content(1))))
    assert resolved(settings(model)) == path
    assert len(commands) == 1 and not path.is_symlink() and load(path).version == 1
    assert victim.read_text() == "precious"
    assert log[0].startswith(f"KV cache calibration: {reason.format(path=path)}") and log[0].endswith(
        "it was deleted and is made again"
    )
    assert resolved(settings(model)) == path and len(commands) == 1


@pytest.mark.parametrize(
    "plant",
    [lambda path: path.symlink_to("victim"), os.mkfifo, lambda path: path.mkdir()],
    ids=["link", "FIFO", "folder"],
)
def test_a_planted_lock_harms_nothing(
    plant: Callable[[Path], object],
    model: str,
    victim: Path,
    until_exit: Path,
    tmp_path: Path,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No file of this user's is truncated, and no FIFO is waited for."""
    lock = cached_file(settings(model)).with_suffix(".lock")
    plant(lock)
    instead(monkeypatch, copies(write(tmp_path, content(1))))
    assert resolved(settings(model)).parent.parent == until_exit
    assert victim.read_text() == "precious"
    assert f"{lock} is not a regular file; delete it" in log[0]


def test_what_a_killed_calibration_left_is_removed(
    model: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True, mode=0o700)
    (cache / f".{new_name()}").touch()
    instead(monkeypatch, copies(write(tmp_path, content(1))))
    path = resolved(settings(model))
    assert sorted(cache.iterdir()) == [path, path.with_suffix(".lock")]
