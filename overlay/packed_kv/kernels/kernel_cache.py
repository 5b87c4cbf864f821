"""Keep compiled kernels on disk, and load only what this user wrote and nothing damaged since.

A file is the machine code and a SHA-256 digest of its name and code. A damaged file is compiled again and replaced.
Nothing is loaded from a folder or file that another user owns or can write: its code would run on the GPU or in this
process. The next process that asks for a kernel removes the files of a killed compile.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..private_file import Untrusted, own_folder, read_own, replace_file, sweep, why_not_replaced

logger = logging.getLogger("vllm.packed_kv")
DIGEST_BYTES = 32
ANOTHER = "name a folder of your own by PACKED_KV_CACHE"


class NoHome(OSError):
    """The cache's folder is not known."""


class _Damaged(Exception):
    """A file whose digest does not match."""


def cache_folder() -> Path:
    """Return the folder of compiled kernels: PACKED_KV_CACHE, or packed_kv in the user's cache folder.

    Raises NoHome: the path begins with a home folder, and there is none.
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
    _sweep_once(path.parent)
    try:
        if not again:
            with own_folder(path.parent, ANOTHER) as folder:
                return _read(folder, path)
    except FileNotFoundError:
        pass
    except _Damaged:
        logger.warning("%s is damaged; the kernel is compiled again", path)
    except (Untrusted, OSError) as error:
        keep = False
        _warn(f"compiled kernels are not loaded from the cache, and compiled at each start: {_with_remedy(error)}")
    code = compile_kernel()
    if keep:
        try:
            with own_folder(path.parent, ANOTHER) as folder:
                replace_file(path, code + _digest(path.name, code), 0o600, folder)
        except (Untrusted, OSError) as error:
            reason = _with_remedy(error)
            _warn(f"compiled kernels cannot be kept in {path.parent}, and are compiled at each start: {reason}")
    return code


def why_not_kept() -> str:
    """Say why compiled kernels cannot be kept; "": they can. Makes the folder, as keeping one does."""
    try:
        with own_folder(folder := cache_folder(), ANOTHER):
            reason = why_not_replaced(folder / "kernel")
    except (Untrusted, OSError) as error:
        return _with_remedy(error)
    return f"{reason}; {ANOTHER}" if reason else ""


def _with_remedy(error: Exception) -> str:
    return f"{error}; {ANOTHER}" if isinstance(error, OSError) else str(error)


def _read(folder: int, path: Path) -> bytes:
    """Return the machine code of a file. Raises FileNotFoundError, _Damaged, Untrusted and OSError."""
    content = read_own(folder, path)
    code, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if digest != _digest(path.name, code):
        raise _Damaged
    return code


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + code).digest()


def _warn(line: str) -> None:
    """Log a line once per process: a server asks for several kernels, in several threads."""
    with _one_thread:
        _warn_once(line)


_one_thread = threading.Lock()


@functools.cache
def _sweep_once(cache: Path) -> None:
    """Remove files of killed compiles in the cache and in TMPDIR."""
    sweep(cache)
    with suppress(OSError):  # nothing can be written anywhere
        sweep(Path(tempfile.gettempdir()))


@functools.cache
def _warn_once(line: str) -> None:
    logger.warning(line)
