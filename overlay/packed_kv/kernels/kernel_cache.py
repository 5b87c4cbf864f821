"""Keep compiled kernels on disk, and load only what this user wrote and nothing damaged since.

A file is the machine code and a SHA-256 digest of its name and code. A damaged file is compiled again and replaced. A
folder or file that another user owns or can write is not loaded from: its code would run on the GPU or in this process.
What a killed compile left is removed by the next process that asks for a kernel.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..private_file import Untrusted, own_folder, read_own, replace_file, sweep, why_not_replaced

logger = logging.getLogger("vllm.packed_kv")
DIGEST_BYTES = 32
ANOTHER = "name a folder of your own by PACKED_KV_CACHE"


class _Damaged(Exception):
    """A file whose digest does not match."""


def cache_folder() -> Path:
    """Return the folder of compiled kernels: PACKED_KV_CACHE, or packed_kv in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "packed_kv"
    return Path(os.environ.get("PACKED_KV_CACHE") or default)


def load_or_compile(name: str, compile_kernel: Callable[[], bytes]) -> bytes:
    """Return the machine code of a kernel from the cache, or compile and keep it.

    Args:
        name: of its file; different for different sources, options and compilers.
        compile_kernel: returns the machine code; its errors are raised.
    """
    path = cache_folder() / name
    keep = True
    try:
        with own_folder(path.parent, ANOTHER) as folder:
            _sweep_once(path.parent)
            return _read(folder, path)
    except FileNotFoundError:
        pass
    except _Damaged:
        logger.warning("%s is damaged; the kernel is compiled again", path)
    except (Untrusted, OSError) as error:
        keep = False
        _warn_once(f"compiled kernels are not loaded from the cache, and compiled at each start: {error}")
    code = compile_kernel()
    if keep:
        try:
            with own_folder(path.parent, ANOTHER) as folder:
                replace_file(path, code + _digest(path.name, code), 0o600, folder)
        except (Untrusted, OSError) as error:
            _warn_once(f"compiled kernels cannot be kept in {path.parent}, and are compiled at each start: {error}")
    return code


def why_not_kept() -> str:
    """Say why compiled kernels cannot be kept; "": they can. Makes the folder, as keeping one does."""
    folder = cache_folder()
    try:
        with own_folder(folder, ANOTHER):
            reason = why_not_replaced(folder / "kernel")
    except Untrusted as error:
        return str(error)
    except OSError as error:
        reason = str(error)
    return f"{reason}; {ANOTHER}" if reason else ""


def _read(folder: int, path: Path) -> bytes:
    """Return the machine code of a file. Raises FileNotFoundError, _Damaged, Untrusted and OSError."""
    content = read_own(folder, path)
    code, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if digest != _digest(path.name, code):
        raise _Damaged
    return code


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + code).digest()


@functools.cache
def _sweep_once(cache: Path) -> None:
    """Remove what killed compiles left, in the cache and in TMPDIR."""
    sweep(cache)
    sweep(Path(tempfile.gettempdir()))


@functools.cache
def _warn_once(line: str) -> None:
    """Log a line once per process: a server asks for several kernels."""
    logger.warning(line)
