"""Keep compiled kernels on disk, and load only what this user wrote and nothing damaged since.

A file is the machine code and a SHA-256 digest of its name and code. A damaged file is compiled again and replaced. A
folder or file that another user owns or can write is not loaded from: its code would run on the GPU or in this process.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger("vllm.packed_kv")
DIGEST_BYTES = 32
ANOTHER = "name a folder of your own by PACKED_KV_CACHE"


class NoHome(OSError):
    """The cache's folder is not known."""


class _Untrusted(Exception):
    """A folder or file that is not loaded from; the message says why."""


class _Damaged(Exception):
    """A file whose digest does not match."""


def cache_folder() -> Path:
    """Return the folder of compiled kernels: PACKED_KV_CACHE, or packed_kv in the user's cache folder.

    Raises NoHome: the path begins at a home folder, and there is none.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "packed_kv")
    path = os.path.expanduser(os.environ.get("PACKED_KV_CACHE") or default)
    if path.startswith("~"):
        raise NoHome(f"there is no home folder for {path} (HOME is not set, and /etc/passwd does not name one)")
    return Path(path)


def load_or_compile(name: str, compile_kernel: Callable[[], bytes], *, again: bool = False) -> bytes:
    """Return the machine code of a kernel from the cache, or compile and keep it.

    Args:
        name: of its file; different for different sources, options and compilers.
        compile_kernel: returns the machine code; its errors are raised.
        again: compile it even if it is in the cache, and replace it there.
    """
    try:
        path = cache_folder() / name
    except NoHome as error:
        _warn(f"compiled kernels are not kept, and compiled at each start: {_with_remedy(error)}")
        return compile_kernel()
    keep = True
    try:
        if not again:
            with _opened_folder(path.parent) as folder:
                return _read(folder, path)
    except FileNotFoundError:
        pass
    except _Damaged:
        logger.warning("%s is damaged; the kernel is compiled again", path)
    except (_Untrusted, OSError) as error:
        keep = False
        _warn(f"compiled kernels are not loaded from the cache, and compiled at each start: {_with_remedy(error)}")
    code = compile_kernel()
    if keep:
        try:
            with _opened_folder(path.parent) as folder:
                _write(folder, path, code)
        except (_Untrusted, OSError) as error:
            reason = _with_remedy(error)
            _warn(f"compiled kernels cannot be kept in {path.parent}, and are compiled at each start: {reason}")
    return code


def why_not_kept() -> str:
    """Say why compiled kernels cannot be kept; "": they can. Makes the folder, as keeping one does."""
    probe = f".{secrets.token_hex(8)}"
    try:
        with _opened_folder(cache_folder()) as folder:
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder))
            os.unlink(probe, dir_fd=folder)
    except (_Untrusted, OSError) as error:
        return _with_remedy(error)
    return ""


def _with_remedy(error: Exception) -> str:
    return f"{error}; {ANOTHER}" if isinstance(error, OSError) else str(error)


@contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    """Make the folder if there is none, and give its descriptor. Raises _Untrusted and OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(path, os.fstat(descriptor), ANOTHER)
        yield descriptor
    finally:
        os.close(descriptor)


def _check(path: Path, status: os.stat_result, remedy: str) -> None:
    if status.st_uid != os.geteuid():
        raise _Untrusted(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}; {remedy}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Untrusted(f"others can write {path} (mode {status.st_mode & 0o777:o}); {remedy}")


def _read(folder: int, path: Path) -> bytes:
    """Return the machine code of a file. Raises FileNotFoundError, _Damaged, _Untrusted and OSError."""
    status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)  # nobody else can replace it before it is read
    if not stat.S_ISREG(status.st_mode):
        raise _Untrusted(f"{path} is not a regular file; delete it")
    _check(path, status, "delete it")
    with open(os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as file:
        content = file.read()
    code, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if digest != _digest(path.name, code):
        raise _Damaged
    return code


def _write(folder: int, path: Path, code: bytes) -> None:
    """Write a file so that readers, and starts after a crash, see all of it or nothing."""
    temporary = f".{path.name}.{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(code + _digest(path.name, code))
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # an interrupt, too, must leave no temporary file; raised again below
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + code).digest()


def _warn(line: str) -> None:
    """Log a line once per process: a server asks for several kernels, in several threads."""
    with _one_thread:
        _warn_once(line)


_one_thread = threading.Lock()


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning(line)
