"""Opens files in folders that an option, an environment variable or a cache names, where others may have put anything:
a link, a FIFO, a file of their own. Imports no torch and no vLLM.

- What is loaded unseen (compiled kernels, the calibration that an engine makes) lies in a folder of this user alone:
  `own_folder`, `open_own`, `locked`.
- What is written (these, and results that a user asked for) is written beside its name and renamed: `replacing`. So no
  link is followed, no FIFO waited for, and a reader sees all of the old file or all of the new one.
- An unfinished file or folder has a name with this machine's name and a random number, and its maker holds a lock: on
the file, or on a file in the folder. `sweep` removes unfinished files of this machine whose lock is free, in folders
where nobody else can rename them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY = re.compile(r"\.?packed_kv-([0-9a-f]{8})-[0-9a-f]{16}\.tmp")
"""Names of unfinished files (with the dot) and folders, with a digest of the machine's name."""
LOCK = ".lock"
"""File in an unfinished folder that its makers lock; a folder without it is never removed."""
TRIAL = bytes(4096)
"""Content that `why_not_replaced` writes, as a full disk takes an empty file."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of opening a link, a folder, or a FIFO or socket for writing."""


class Untrusted(Exception):
    """A folder or file that others own or can write: the reason, and a remedy."""

    def __init__(self, reason: str, remedy: str = "delete it") -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


class NotRegular(OSError):
    """A FIFO or a device has the file's name."""


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a regular file, without waiting for the other end of a FIFO. Returns its descriptor. Raises OSError."""
    file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise NotRegular(errno.EINVAL, "not a regular file", os.fspath(path))


@contextlib.contextmanager
def own_folder(path: Path, remedy: str) -> Iterator[int]:
    """Make the folder if there is none, and give its descriptor. Raises Untrusted, with the remedy, and OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_own(path, os.fstat(folder), remedy)
        yield folder
    finally:
        os.close(folder)


def open_own(folder: int, path: Path, flags: int = os.O_RDONLY, *, is_lock: bool = False) -> int:
    """Open a file of an own folder, made for its owner alone if `flags` say so. Returns its descriptor.

    Raises FileNotFoundError, OSError, and Untrusted for a link, for what is no regular file, and for a file that
    another user owns or can write. If it `is_lock`, nobody reads it: an own one that others can write is closed to
    them.
    """
    try:
        file = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise Untrusted(f"{path} is not a regular file") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise Untrusted(f"{path} is not a regular file")
        if is_lock and status.st_uid == os.geteuid() and status.st_mode & OTHERS_WRITE:
            os.fchmod(file, stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
            status = os.fstat(file)
        _check_own(path, status)
    except BaseException:  # an interrupt, too, must leave no descriptor open; raised again
        os.close(file)
        raise
    return file


def read_own(folder: int, path: Path) -> bytes:
    """Return the content of a file of an own folder. Raises as `open_own` does."""
    with open(open_own(folder, path), "rb") as file:
        return file.read()


@contextlib.contextmanager
def locked(folder: int, path: Path, waiting: Callable[[], None]) -> Iterator[int]:
    """Wait for a lock file in an own folder, and hold the lock; `waiting` is called before a wait.

    Gives its descriptor: the lock is free when all copies of it are closed. The file's content stays as it is. A file
    of this user's that others can write, as some umasks make it, is closed to them. Raises as `open_own` does.
    """
    file = open_own(folder, path, os.O_RDWR | os.O_CREAT, is_lock=True)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, folder: int | None = None) -> Iterator[tuple[BinaryIO, Path]]:
    """Give a new file beside `path` to write into, and its path. At the end it replaces whatever has the name; if the
    block raises, it is removed. Raises OSError.

    Args:
        mode: permissions of the file, less the umask.
        folder: descriptor of the folder; None: the one that the path names.
    """
    file, temporary = _make_file(path, mode, folder)
    try:
        with file:
            yield file, temporary
            file.flush()
            os.fsync(file.fileno())
            os.replace(_at(folder, temporary), _at(folder, path), src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # an interrupt, too, must leave no temporary file; raised again
        with contextlib.suppress(OSError):
            os.unlink(_at(folder, temporary), dir_fd=folder)
        raise
    if folder is not None:
        with contextlib.suppress(OSError):  # the file is there
            os.fsync(folder)


def replace_file(path: Path, content: bytes, mode: int = 0o666, folder: int | None = None) -> None:
    """Write a file, as `replacing` does. Raises OSError."""
    with replacing(path, mode, folder) as (file, _):
        file.write(content)


def why_not_replaced(path: Path) -> str:
    """Say why `replacing` could not write a file in its folder, which is not made; "": it could."""
    there = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not there.is_dir():
        return f"{there} is a {'file' if there.exists() else 'link that leads nowhere'}"
    if reason := _why_kept(path):
        return f"{path} {reason}"
    try:
        file, temporary = _make_file(there / path.name, 0o600, None)
        try:
            with file:
                file.write(TRIAL)
        finally:
            temporary.unlink()
    except OSError as error:
        return f"{there} cannot be written to ({error.strerror})"
    return ""


def _why_kept(path: Path) -> str:
    """Say why whatever has a file's name cannot be replaced; "": it can. A link can be replaced; its target stays."""
    try:
        status, folder = path.lstat(), path.parent.stat()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:  # too long a name, or a NUL in it
        return f"cannot be written ({getattr(error, 'strerror', error)})"
    if stat.S_ISDIR(status.st_mode):
        return "is a folder"
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
        return "is not a regular file"
    if folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, folder.st_uid, status.st_uid):
        return f"belongs to user {status.st_uid}, who alone can replace it there"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.EPERM:  # chattr +i or +a; permission to write the old content is not needed
            return "cannot be replaced (Operation not permitted)"
    return ""


@contextlib.contextmanager
def temporary_folder(otherwise: Path | None = None, *, anywhere: bool = False) -> Iterator[tuple[Path, int]]:
    """Give the path of a new folder of this user's below TMPDIR, and the descriptor of its lock, for processes that
    work in it. Removes the folder at the end. Raises OSError.

    Args:
        otherwise: folder to take, and to make if need be, where TMPDIR cannot be used: there is none, or others can
            rename what is in it. None: OSError.
        anywhere: take TMPDIR even if others can rename what is in it, as nothing from the folder is run.
    """
    root, owner = Path(tempfile.gettempdir()) if anywhere else _root(otherwise), os.getpid()
    sweep(root)
    while True:
        path = root / new_name()
        path.mkdir(0o700)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        if _keep(lock, path / LOCK, None):
            break
        os.close(lock)
    try:
        yield path, lock
    finally:
        if os.getpid() == owner:  # and no process that it forked
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _root(otherwise: Path | None) -> Path:
    """Return TMPDIR, or the other folder. Raises OSError."""
    try:
        root = Path(tempfile.gettempdir())  # FileNotFoundError: nothing can be written anywhere
        if root.is_dir():
            _check_names_stay(root, root.stat())
        return root
    except OSError:
        if otherwise is None:
            raise
    otherwise.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_names_stay(otherwise, otherwise.stat())
    return otherwise


def _check_names_stay(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError if others can rename this user's files in a folder: it has no sticky bit, and they can
    write it, or it belongs to another user than root."""
    is_shared = status.st_mode & OTHERS_WRITE or status.st_uid not in (0, os.geteuid())
    if is_shared and not status.st_mode & stat.S_ISVTX:
        of_whom = f"user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}, no sticky bit"
        reason = f"others can rename what is in it ({of_whom})"
        raise PermissionError(errno.EPERM, reason, str(path))


def new_name() -> str:
    """Return a name for an unfinished file or folder of this machine."""
    return f"packed_kv-{_machine()}-{secrets.token_hex(8)}.tmp"


def _machine() -> str:
    """Return a digest of the machine's name: locks of a file system may be told to no other machine."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def sweep(path: Path) -> None:
    """Remove unfinished files of this user's killed processes on this machine from a folder, unless others can rename
    files there. Files of running processes are locked."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _check_names_stay(path, os.fstat(folder))
            for name in os.listdir(folder):
                if (found := TEMPORARY.fullmatch(name)) and found[1] == _machine():
                    with contextlib.suppress(OSError):  # locked, another user's, or gone
                        _remove_left(folder, name)
        finally:
            os.close(folder)


def _remove_left(folder: int, name: str) -> None:
    """Remove a file of this user's, or a folder with a lock, if the lock is free. Raises OSError."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    is_folder = stat.S_ISDIR(status.st_mode)
    if status.st_uid != os.geteuid() or not (is_folder or stat.S_ISREG(status.st_mode)):
        return
    locked_file = f"{name}/{LOCK}" if is_folder else name
    lock = os.open(locked_file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # NFS locks what is written
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_folder:
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(lock)


def _make_file(path: Path, mode: int, folder: int | None) -> tuple[BinaryIO, Path]:
    """Return a new locked file beside `path`, open for writing, and its path."""
    while True:
        temporary = path.with_name(f".{new_name()}")
        file = os.open(_at(folder, temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=folder)
        if _keep(file, temporary, folder):
            return open(file, "wb"), temporary
        os.close(file)


def _keep(made: int, path: Path, folder: int | None) -> bool:
    """Lock what was just made. Returns False if `sweep` of another process was faster."""
    try:
        fcntl.flock(made, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where `sweep` removes nothing
        return True
    try:
        found = os.stat(_at(folder, path), dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(made))


def _at(folder: int | None, path: Path) -> str:
    return str(path) if folder is None else path.name


def _check_own(path: Path, status: os.stat_result, remedy: str = "delete it") -> None:
    if status.st_uid != os.geteuid():
        raise Untrusted(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}", remedy)
    if status.st_mode & OTHERS_WRITE:
        what = f"others can write {path} (mode {status.st_mode & 0o777:o})"
        raise Untrusted(what, f"run: chmod go-w {path}, or {remedy}" if stat.S_ISDIR(status.st_mode) else remedy)
