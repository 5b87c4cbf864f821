"""Files of KV pages: what is another engine's, or not whole, is a miss and one line; nothing stops serving."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packed_kv.sharing import tiers
from packed_kv.sharing.file_tier import FOOTER, PackedFileTier, read_pages, write_pages
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

CHUNK, CHUNKS = 8192, 12
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(CHUNKS)]
REQUEST = ReqContext("a request")


class Host:
    """A host tier of `CHUNKS` chunks and a disk tier behind it; what an engine does with these, step by step."""

    def __init__(self, root: Path, page_format: str = "isoquant4-0123456789abcdef", **options: Any) -> None:
        self.pages = np.frombuffer(mmap.mmap(-1, CHUNKS * CHUNK), np.uint8).reshape(CHUNKS, CHUNK)  # for O_DIRECT
        spec = SimpleNamespace(
            config=config(**options), kv_events_config=SimpleNamespace(enable_kv_cache_events=True), blocks_per_chunk=1
        )
        self.tier = PackedFileTier(
            spec, memoryview(self.pages), "packed_kv_fs", str(root), page_format,
            n_read_threads=2, n_write_threads=2, enable_kv_events=True,
        )  # fmt: skip
        self.jobs = 0

    def store(self, numbers: range = range(CHUNKS)) -> Any:
        """The job's result, of chunks with bytes of their own."""
        self.pages[:] = np.random.default_rng(0).integers(0, 256, self.pages.shape, np.uint8)
        return self.run(self.tier.submit_store, numbers, is_promotion=False)

    def load(self) -> Any:
        self.pages[:] = 0
        return self.run(self.tier.submit_load, range(CHUNKS), is_promotion=True)

    def run(self, submit: Callable[[TransferJob], None], numbers: range, is_promotion: bool) -> Any:
        self.jobs += 1
        keys = [KEYS[number] for number in numbers]
        submit(TransferJob(self.jobs, keys, np.array(numbers), is_promotion, REQUEST))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return result

    def has(self, number: int) -> bool:
        """True if the tier says that it has a chunk."""
        while (found := self.tier._lookup_manager.lookup(KEYS[number], REQUEST)) is None:
            self.tier._lookup_manager.flush()
        return found

    def path(self, number: int) -> Path:
        return Path(self.tier.file_mapper.get_file_name(KEYS[number]))


def config(ranks: int = 1, canonical: bool = False, agnostic: bool = True, name: str = "a/model") -> OffloadingConfig:
    made = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), *[0] * (len(fields(OffloadingGroupConfig)) - 2)),),
        worker_kv_bytes_per_block=CHUNK // ranks,
        enable_kv_cache_events=True,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name, "isoquant4"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, ranks, ranks, 1, 1, 1, 0, 1, None, agnostic),
    )
    return replace(made, canonical_layout=canonical, kv_cache_layout="LBHNC")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that are logged from warnings on: by us, and by the threads of vLLM's tier."""
    found: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    for name in ("vllm.packed_kv", "vllm.v1.kv_offload.tiering.fs.thread_pool"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [handler])
        monkeypatch.setattr(logger, "level", logging.INFO)
        logger.isEnabledFor.__self__._cache.clear()
    return found


def test_what_is_stored_comes_back(tmp_path: Path, lines: list[str]) -> None:
    host = Host(tmp_path)
    assert host.store().success
    stored = host.pages.copy()
    later = Host(tmp_path)
    assert all(map(later.has, range(CHUNKS)))
    assert later.load().success
    assert (later.pages == stored).all()
    assert not lines
    assert {path.stat().st_size for path in tmp_path.rglob("*.bin")} == {CHUNK + FOOTER}
    assert not [*tmp_path.rglob("*.tmp")]


def truncate(path: Path, _other: Path) -> None:
    os.truncate(path, CHUNK)


def empty(path: Path, _other: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path, _other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[CHUNK // 2] ^= 1
    path.write_bytes(content)


def zero_the_end(path: Path, _other: Path) -> None:
    """Leave a file as a file system may whose last page was not written before the power went."""
    path.write_bytes(path.read_bytes()[:CHUNK].ljust(CHUNK + FOOTER, b"\0"))


def foreign(path: Path, other: Path) -> None:
    """Whole, but of another chunk."""
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [truncate, empty, flip, zero_the_end, foreign], ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_a_miss(damage: Callable[[Path, Path], None], tmp_path: Path, lines: list[str]) -> None:
    """Chunks before it are kept, those from it on computed again and its file written again."""
    host = Host(tmp_path)
    host.store()
    stored = host.pages.copy()
    damage(host.path(7), host.path(3))
    host = Host(tmp_path)
    assert all(map(host.has, range(CHUNKS)))
    result = host.load()
    assert not result.success
    assert list(result.successful_keys) == KEYS[:7]
    assert (host.pages[:7] == stored[:7]).all()
    (line,) = lines
    assert f"{host.path(7)} is truncated, corrupted or another engine's: treated as a cache miss and deleted" in line
    assert [host.has(number) for number in range(CHUNKS)] == [True] * 7 + [False] * 5
    host.store()
    assert Host(tmp_path).load().success


def test_all_damaged_files_of_a_job_are_written_again(tmp_path: Path, lines: list[str]) -> None:
    """Also those behind the first, which the same job does not use: else each would cost a later load."""
    host = Host(tmp_path)
    host.store()
    stored = host.pages.copy()
    for number, damage in {1: flip, 3: flip, 5: truncate, 11: empty}.items():
        damage(host.path(number), host.path(0))
    assert list(host.load().successful_keys) == KEYS[:1]
    assert len(lines) == 2, "one for each of two threads"
    assert "(and 2 more)" in " ".join(lines)
    host.store()
    later = Host(tmp_path)
    assert later.load().success
    assert (later.pages == stored).all()


def test_a_file_of_another_size_is_written_again(tmp_path: Path) -> None:
    """Without a load that finds it."""
    host = Host(tmp_path)
    host.store()
    truncate(host.path(7), host.path(3))
    host.store()
    assert host.load().success


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    """A terminal, from which a read would wait."""
    path.symlink_to(os.ttyname(os.openpty()[1]))


def link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


def link_to_pages(path: Path) -> None:
    """Whole, of the right name, and elsewhere."""
    path.symlink_to(path.with_name("elsewhere"))
    path.with_name("elsewhere").write_bytes(path.with_name("kept").read_bytes())


def bound_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has 108 characters at most
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def folder(path: Path) -> None:
    path.mkdir()
    (path / "somebody's").write_text("notes")


@pytest.mark.parametrize("put", [fifo, device, link, link_to_pages, bound_socket, folder], ids=lambda put: put.__name__)
def test_what_is_no_file_is_a_miss_and_gives_way(put: Callable[[Path], None], tmp_path: Path, lines: list[str]) -> None:
    """Nobody waits for it or follows it; what is in a folder stays."""
    host = Host(tmp_path)
    host.store()
    stored, path = host.pages.copy(), host.path(7)
    path.rename(path.with_name("kept"))
    put(path)
    for loads in (True, False):  # seen by a load first, or by the store
        if loads:
            assert list(run_with_deadline(host.load).successful_keys) == KEYS[:7]
            if put is not link:  # whose target is missing
                assert len(lines) == 1
                assert f"{path} is truncated, corrupted or another engine's: treated as a cache miss and" in lines[0]
                assert not os.path.lexists(path)
        else:
            path.unlink()
            put(path)
        host.store()
        assert stat.S_ISREG(path.lstat().st_mode)
        later = Host(tmp_path)
        assert later.load().success
        assert (later.pages == stored).all()
    if put is folder:
        (moved, _again) = path.parent.glob("*.moved")
        assert (moved / "somebody's").read_text() == "notes"


def run_with_deadline(load: Callable[[], Any]) -> Any:
    """Return what `load` returns; fails where it waits for 20 s."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(load()), daemon=True)
    thread.start()
    thread.join(20)
    assert results, "the load hangs"
    return results[0]


def test_a_file_that_may_not_be_read_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path)
    host.store()
    real = os.open

    def refuse(path: Path, flags: int, *more: Any) -> int:
        if str(path) == str(host.path(7)) and not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *more)

    with monkeypatch.context() as patch:  # root may read all
        patch.setattr(os, "open", refuse)
        assert not host.load().success
    assert not host.path(7).exists()
    assert host.path(8).exists()
    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        assert not host.load().success
    assert host.path(8).exists(), "a failing disk is no reason to remove files"


@pytest.mark.parametrize("damage", [flip, truncate], ids=lambda damage: damage.__name__)
def test_damaged_pages_that_cannot_be_deleted_are_one_line(
    damage: Callable[[Path, Path], None], tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder that was made immutable. A miss from then on; nobody tries to read or write them again."""
    host = Host(tmp_path)
    host.store()
    damage(host.path(7), host.path(3))
    stuck, unlink = host.path(7), Path.unlink

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        if path == stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, *args, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert list(host.load().successful_keys) == KEYS[:7]
    (line,) = lines
    assert f"{stuck} is truncated, corrupted or another engine's, and cannot be deleted (Operation not" in line
    assert host.tier.lookup(KEYS[7], REQUEST) is LookupResult.MISS
    assert host.has(7), "vLLM finds a file"
    while (found := host.tier.lookup(KEYS[8], REQUEST)) is LookupResult.RETRY:
        host.tier._lookup_manager.flush()
    assert found is LookupResult.HIT
    list(host.tier.take_events())
    assert host.store().success
    announced = [key for event in host.tier.take_events() for key in event.keys]
    assert sorted(announced) == sorted(KEYS[:7] + KEYS[8:]), "others are not told of pages that are not there"
    assert len(lines) == 1


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_nobody_else_reads_what_is_written(umask: int, tmp_path: Path) -> None:
    """Folders 0700 and files 0600, also those above the tier's own that it has to make."""
    root = tmp_path / "new" / "root"
    before = os.umask(umask)
    try:
        assert not tiers._unusable(str(root))
        Host(root).store()
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")}
    modes[root.parent] = stat.S_IMODE(root.parent.stat().st_mode)
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}, modes
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}, modes


def test_a_models_path_may_be_long(tmp_path: Path) -> None:
    """vLLM makes a folder's name of it; of ours its last part is in it, and the page format says which model it is."""
    paths = ["/" + "folder/" * 40 + "model" * 30, "/elsewhere/" + "model" * 30]
    hosts = [Host(tmp_path, name=path) for path in paths]
    assert hosts[0].store().success
    assert hosts[1].load().success
    longest = max(len(str(path.relative_to(tmp_path))) for path in tmp_path.rglob("*.bin"))
    assert longest + len("_4194304_01234567.moved") < tiers.LONGEST


def test_a_root_that_may_not_be_listed_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mode 300: its files can be written and read by their names."""

    def refuse(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)  # root may list all
    assert not tiers._unusable(str(tmp_path))
    host = Host(tmp_path)
    assert host.store().success and host.load().success


def test_a_file_of_vllms_own_tier_is_a_miss(tmp_path: Path, lines: list[str]) -> None:
    host = Host(tmp_path)
    FileSystemTierManager.submit_store(host.tier, TransferJob(1, KEYS, np.arange(CHUNKS), False, REQUEST))
    host.tier.drain_jobs()
    assert [result.success for result in host.tier.get_finished_jobs()] == [True]
    assert not host.load().success
    assert len(lines) == host.tier.threads  # each has taken one


def test_pages_of_other_engines_are_not_found(tmp_path: Path, lines: list[str]) -> None:
    Host(tmp_path).store()
    other_formats = [{"page_format": name} for name in ("isoquant4-fedcba9876543210", "turboquant25-0123456789abcdef")]
    for options in (*other_formats, {"ranks": 2}, {"canonical": True}):
        lines.clear()
        host = Host(tmp_path, **options)
        assert not any(map(host.has, range(CHUNKS)))
        (line,) = lines
        assert f"{tmp_path} holds only pages of other models, dtypes, calibrations, versions or ranks" in line


def test_only_canonical_pages_are_shared_between_ranks(tmp_path: Path) -> None:
    """vLLM takes pages in a layout of the ranks' own to be shared, too, where its first model runner is used."""
    folders = [Host(tmp_path, ranks=n, canonical=c).tier.file_mapper.base_path for c in (False, True) for n in (1, 2)]
    assert folders[0] != folders[1] != folders[2] == folders[3]
    assert Host(tmp_path, ranks=2, canonical=True, agnostic=False).tier.file_mapper.base_path not in folders


def test_no_space_is_said_once(tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path)
    there = range(CHUNKS // 2)
    host.store(there)

    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        # Chunks that are there already are no proof of room.
        results = [host.store(numbers).success for numbers in (range(CHUNKS), there, range(CHUNKS), there)]
        assert results == [False, True, False, True]
    assert len(lines) == 1
    assert f"cannot write into {tmp_path} ([Errno 28] No space left on device); new pages are not stored" in lines[0]
    assert sum(len(event.keys) for event in host.tier.take_events()) == 3 * len(there)
    assert len([*tmp_path.rglob("*.bin")]) == len(there)
    assert not [*tmp_path.rglob("*.tmp")]
    assert host.store().success
    assert len(lines) == 2
    assert "works again" in lines[1]
    assert [*host.tier.take_events()]


def test_killed_while_writing(tmp_path: Path) -> None:
    """Processes that are killed while they write one file after the other leave only whole files."""
    pages = memoryview(bytes(1 << 20))
    whole = 0
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        if not (child := os.fork()):
            for number in range(1 << 30):
                write_pages(folder / f"{number}.bin", tmp_path, pages, direct=False)
        while not (folder / "1.bin").exists():
            time.sleep(0.001)
        time.sleep(0.003 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in folder.glob("*.bin"):
            read_pages(path, tmp_path, memoryview(bytearray(len(pages))), direct=False)
            whole += 1
    assert whole > 5


def test_calls_that_move_a_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux moves less than 2 GiB in one call."""

    def part_of(move: Any) -> Any:
        return lambda file, parts: move(file, [parts[0][:3000]])

    for name in ("writev", "readv"):
        monkeypatch.setattr(os, name, part_of(getattr(os, name)))
    pages, path = os.urandom(20480), tmp_path / "model" / "1.bin"
    write_pages(path, tmp_path, memoryview(pages), direct=False)
    found = memoryview(bytearray(len(pages)))
    read_pages(path, tmp_path, found, direct=False)
    assert found == pages
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match="truncated"):
        read_pages(path, tmp_path, found, direct=False)
