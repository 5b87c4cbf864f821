"""Faults that the soak with restarts finds: bad files, locks that are held, what outlives a kill, other tokens."""

from __future__ import annotations

import fcntl
import os
from argparse import Namespace
from pathlib import Path

import soak_restarts
from packed_kv.sharing.file_tier import write_pages

WELL = {
    "errors": 0, "first_errors": [], "alone": 2, "alone_again_the_same": 2, "samples": 5, "samples_parted": 1,
    "host_growth_mib": 1.0, "device_growth_mib": 0.0, "answers_from_disk": 4, "answers_from_disk_wrong": 0,
    "tokens_from_disk": 64, "files": 9, "bad_files": [],
    "kills": [{"processes_left": [], "shared_memory_left": [], "locks_held": []}],
}  # fmt: skip


def test_files_are_checked(tmp_path: Path) -> None:
    for number in range(3):
        write_pages(tmp_path / "model" / f"{number}.bin", tmp_path, memoryview(os.urandom(8192)), direct=False)
    (tmp_path / "model" / "begun.tmp").write_bytes(b"")
    assert soak_restarts.check_files(tmp_path) == {"files": 3, "bad_files": [], "files_begun": 1}
    with open(tmp_path / "model" / "1.bin", "r+b") as file:
        file.write(b"damaged")
    (tmp_path / "model" / "2.bin").write_bytes(b"short")
    bad = soak_restarts.check_files(tmp_path)["bad_files"]
    assert ["1.bin" in bad[0], "2.bin" in bad[1], len(bad)] == [True, True, 2]


def test_locks_are_looked_at(tmp_path: Path) -> None:
    for name in ("free.lock", "held.lock"):
        (tmp_path / name).write_text("")
    with open(tmp_path / "held.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert soak_restarts.held_locks(tmp_path) == ["held.lock"]
    assert soak_restarts.held_locks(tmp_path) == []


def test_what_fails_is_said() -> None:
    options = Namespace(exact=False, growth=64)
    assert soak_restarts.failures(WELL, options) == []
    kill = {"processes_left": ["engine (running)"], "shared_memory_left": ["a"], "locks_held": ["held.lock"]}
    bad = {"answers_from_disk_wrong": 1, "bad_files": ["x is truncated"], "kills": [{}, kill], "errors": 1}
    assert soak_restarts.failures({**WELL, **bad}, options) == [
        "1 errors, the first: []",
        "1 of 4 answers from disk differ",
        "1 of 9 files bad: ['x is truncated']",
        "kill 1: processes_left ['engine (running)']",
        "kill 1: shared_memory_left ['a']",
        "kill 1: locks_held ['held.lock']",
    ]
    assert soak_restarts.failures({**WELL, "files": 0}, options) == ["0 of 0 files bad: []"]
    assert soak_restarts.failures({**WELL, "tokens_from_disk": 0}, options) == ["no prompt was found on disk"]
