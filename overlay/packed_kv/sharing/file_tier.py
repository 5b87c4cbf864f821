"""vLLM's disk tier for packed pages: a file that is truncated, corrupted or another engine's is never read as pages.

vLLM's own tier (`kv_offload/tiering/fs`) trusts a file's name if the file is long enough. Here each file ends with a
checksum of its pages and of its name, and its folder's name is a digest of the page format and the layout over ranks,
too:

    | a chunk's pages, in whole pages of memory | "packedkv" | CRC-32, 4 bytes, little-endian | zeros | = 4096 bytes
"""

from __future__ import annotations

import contextlib
import copy
import functools
import mmap
import os
import re
import stat
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.fs.io import O_DIRECT
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from ..vllm_compat import TierInternals, count_chunks
from .tiers import private_folder

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext

logger = init_logger("vllm.packed_kv")

FOOTER = 4096
"""Bytes behind the pages: what O_DIRECT can write."""
MAGIC = b"packedkv"


class StuckPages(OSError):
    """Damaged pages that cannot be deleted, so that none can be written in their place."""


def write_pages(path: Path, root: Path, pages: memoryview, direct: bool) -> bool:
    """Write a file of pages (bytes) and its footer below `root`, for its owner alone (0600, in folders of 0700).

    Leaves a file of the right size as it is, and returns False; anything else in its place gives way. Another process
    sees all of the file or nothing. Raises OSError.
    """
    if os.path.lexists(path):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_size == len(pages) + FOOTER:
            return False
        _clear(path)
    private_folder(path.parent)
    temporary = path.with_name(f"{path.name}_{os.getpid()}_{os.urandom(4).hex()}.tmp")
    try:
        file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | (O_DIRECT if direct else 0), 0o600)
        try:
            written = _all_of(os.writev, file, [pages, memoryview(_footer(path, root, pages))])
        finally:
            os.close(file)
        if written != len(pages) + FOOTER:
            raise OSError(f"{path}: {written} of {len(pages) + FOOTER} bytes written")
        temporary.replace(path)
        return True
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_pages(path: Path, root: Path, pages: memoryview, direct: bool) -> None:
    """Fill `pages` (bytes) with those of a file below `root`, and wait for no FIFO or device in its place.

    Raises OSError, and makes room where something else has the file's name, so that the file can be written again;
    StuckPages where it cannot.
    """
    try:
        is_whole = _read(path, root, pages, direct)
    except FileNotFoundError:
        raise
    except OSError as error:
        if stat.S_ISREG(path.lstat().st_mode) and not isinstance(error, PermissionError):
            raise  # too many open files, a failing disk: no reason to remove it
        is_whole = False
    if not is_whole:
        try:
            moved = _clear(path)
        except OSError as error:
            raise StuckPages(
                f"{path} is truncated, corrupted or another engine's, and cannot be deleted ({error.strerror}): "
                "treated as a cache miss, and not written again before a restart; delete it"
            ) from error
        what = f"moved to {moved.name}" if moved else "deleted"
        raise OSError(f"{path} is truncated, corrupted or another engine's: treated as a cache miss and {what}")


def _read(path: Path, root: Path, pages: memoryview, direct: bool) -> bool:
    """Fill `pages`; True if they are complete and from a regular file. Raises OSError."""
    footer = mmap.mmap(-1, FOOTER)
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | (O_DIRECT if direct else 0))
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return False
        read = _all_of(os.readv, file, [pages, memoryview(footer)])
    finally:
        os.close(file)
    return read == len(pages) + FOOTER and footer[:] == _footer(path, root, pages)[:]


def _all_of(move: Callable[[int, list[memoryview]], int], file: int, parts: list[memoryview]) -> int:
    """Return how many bytes of `parts` os.writev or os.readv has moved in as many calls as it takes: Linux moves up to
    2 GiB in one."""
    moved = 0
    while parts and (count := move(file, parts)):
        moved += count
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][count:]
    return moved


def _clear(path: Path) -> Path | None:
    """Remove whatever has a file's name. Folders are never ours: a folder is renamed with its content. Returns the new
    path.

    Raises OSError.
    """
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return None
        return path.rename(path.with_name(f"{path.name}_{os.urandom(4).hex()}.moved"))
    except FileNotFoundError:  # another process was faster
        return None


def _footer(path: Path, root: Path, pages: memoryview) -> mmap.mmap:
    """Return a file's footer, in a page of memory of its own, as O_DIRECT wants it."""
    checksum = zlib.crc32(pages, zlib.crc32(str(path.relative_to(root)).encode()))
    footer = mmap.mmap(-1, FOOTER)
    footer.write(struct.pack(f"<{len(MAGIC)}sI", MAGIC, checksum))
    return footer


def _folder_name(model: str) -> str:
    """The part of a model's path or name that fits into a folder's name. `page_format` says which model it is."""
    return re.sub(r"[^\w.-]+", "-", model.rstrip("/").rpartition("/")[2], flags=re.ASCII)[:64]


class PackedFileTier(FileSystemTierManager):
    """vLLM's tier `fs` with files of its own, read and written by several threads a job.

    Args:
        offloading_spec, primary_kv_view, tier_type: of vLLM.
        root_dir: folder, made if it is missing.
        page_format: dtype and fingerprint; with the user's number they stand for the dtype in vLLM's folder name. The
            model's path does not count there: engines that have one model in two places share.
        n_read_threads: and so parts of a job.
        options: further ones of vLLM's tier.

    """

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        root_dir: str,
        page_format: str,
        n_read_threads: int = 16,
        **options: Any,
    ) -> None:
        spec, config = copy.copy(offloading_spec), offloading_spec.config
        # vLLM takes the files of one layout over ranks for those of any other, which is only true of canonical pages.
        portable = config.canonical_layout and config.parallel.is_parallelism_agnostic
        spec.config = replace(
            config,
            model=replace(config.model, name=_folder_name(config.model.name), dtype=f"{page_format}-{os.getuid()}"),
            parallel=replace(config.parallel, is_parallelism_agnostic=portable),
        )
        super().__init__(spec, primary_kv_view, tier_type, root_dir=root_dir, n_read_threads=n_read_threads, **options)
        self.root, self.threads, self.internals = Path(root_dir), n_read_threads, TierInternals(self)
        self.pages, self.chunk_bytes = primary_kv_view.cast("B"), primary_kv_view.nbytes // len(primary_kv_view)
        own = Path(self.file_mapper.base_path)
        with contextlib.suppress(PermissionError):  # vLLM makes them by the umask
            own.chmod(0o700)
            (own / "config.json").chmod(0o600)
        self.failed_stores: set[int] = set()
        self.can_write = True
        self.stuck: set[Path] = set()
        """Paths of damaged pages that cannot be deleted."""
        self.lock = threading.Lock()
        self._tell_of_others()

    def _tell_of_others(self) -> None:
        """Log one line where a folder has pages, but none that this engine can read."""
        own = Path(self.file_mapper.base_path)
        # os.path's is False where the folder may not be entered (lost+found), and Path's raises.
        try:
            others = [entry for entry in self.root.iterdir() if os.path.isfile(entry / "config.json")]
        except OSError:  # a folder that may be written, but not listed
            return
        if len(others) > 1 and not own.with_name(f"{own.name}_r{self.file_mapper.rank}").is_dir():
            logger.warning(
                "KV pages on disk: %s holds only pages of other models, dtypes, calibrations, versions or ranks "
                "(this engine's folder is %s); they are not read",
                self.root,
                own.name,
            )

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self.stuck and self._path(key) in self.stuck:
            return LookupResult.MISS
        return super().lookup(key, req_context)

    def _path(self, key: OffloadKey) -> Path:
        return Path(self.file_mapper.get_file_name(key))

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = job_metadata.job_id
        if self.events is not None:
            self.internals.store_keys[job] = [key for key in job_metadata.keys if self._path(key) not in self.stuck]
        count_chunks(self, job_metadata)
        tasks = self._tasks(job_metadata, self._store)
        self.internals.pool.enqueue_store(job, len(tasks), tasks)

    def submit_load(self, job_metadata: TransferJob) -> None:
        job = job_metadata.job_id
        self.internals.load_keys[job] = list(job_metadata.keys)
        count_chunks(self, job_metadata)
        tasks = self._tasks(job_metadata, self._load)
        self.internals.pool.enqueue_load(job, len(tasks), tasks)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for result in super().get_finished_jobs():
            is_failed = result.job_id in self.failed_stores
            self.failed_stores.discard(result.job_id)
            yield replace(result, success=False) if is_failed else result

    def _tasks(self, job: TransferJob, run: Callable[..., None]) -> list[Callable[[], None]]:
        """Split a job's chunks among threads, in order: (path, pages) of each chunk, and the number of the first
        one."""
        view, size = self.pages, self.chunk_bytes
        chunks = [
            (self._path(key), view[int(chunk) * size : (int(chunk) + 1) * size])
            for key, chunk in zip(job.keys, job.chunk_ids, strict=True)
        ]
        each = -(-len(chunks) // self.threads)
        return [
            functools.partial(run, job.job_id, first, chunks[first : first + each])
            for first in range(0, len(chunks), each)
        ]

    def _store(self, job: int, _first: int, chunks: Sequence[tuple[Path, memoryview]]) -> None:
        """Write chunks, in a thread. A later lookup misses what cannot be written: one line of the log, until
        something can be written again."""
        has_written = False
        try:
            for path, pages in chunks:
                if path not in self.stuck:
                    has_written |= write_pages(path, self.root, pages, self.internals.use_o_direct)
        except OSError as error:
            self.failed_stores.add(job)
            self.internals.store_keys.pop(job, None)  # of which vLLM would tell others
            if self._is_news(can_write=False):
                logger.warning(
                    "KV pages on disk: cannot write into %s (%s); new pages are not stored", self.root, error
                )
        else:
            if has_written and self._is_news(can_write=True):
                logger.info("KV pages on disk: writing into %s works again", self.root)

    def _is_news(self, can_write: bool) -> bool:
        with self.lock:
            was, self.can_write = self.can_write, can_write
        return was != can_write

    def _load(self, job: int, first: int, chunks: Sequence[tuple[Path, memoryview]]) -> None:
        """Read chunks, in a thread. vLLM keeps a job's chunks before the first that fails, and logs one line of error.

        Chunks behind it are read nevertheless: damaged files would otherwise stay, as only what is missing is written.
        """
        failed: list[tuple[int, OSError]] = []
        for number, (path, pages) in enumerate(chunks, start=first):
            try:
                read_pages(path, self.root, pages, self.internals.use_o_direct)
            except OSError as error:
                failed.append((number, error))
                if isinstance(error, StuckPages):
                    self.stuck.add(path)
        if failed:
            number, reason = failed[0]
            with self.lock:
                progress = self.internals.load_progress
                progress[job] = min(number, progress.get(job, number))
            raise OSError(f"{reason} (and {len(failed) - 1} more)") if failed[1:] else reason
