"""An installed vLLM: its version, the state of its touched files, and their replacement.

The record lies beside the package, not inside, so that nothing of it keeps a folder ``vllm`` alive after
``pip uninstall``. It is written before the files: a tree left half-way by a crash holds only files that are
either original or patched, and both ``apply`` and ``revert`` finish from there.
"""

import base64
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

from .pins import PatchError, Pin, choose, sha256

RECORD = "vllm.packed-kv-patches.json"
EXIT_CHANGED, EXIT_UNSUPPORTED, EXIT_NOT_INSTALLED = 3, 4, 5


class State(Enum):
    UNPATCHED = "unpatched"
    PATCHED = "patched"
    OUTDATED = "patched by another revision of the series"
    PARTIAL = "partially patched"
    CHANGED = "changed by hand"


@dataclass(frozen=True)
class Installed:
    """A site-packages folder, with the distribution found there and the pin that fits it."""

    root: Path
    distribution: str
    pin: Pin

    @property
    def record_path(self) -> Path:
        return self.root / RECORD


@dataclass(frozen=True)
class Status:
    state: State
    originals: Mapping[str, bytes]  # original bytes of the files that are not changed by hand
    faults: tuple[str, ...] = ()  # what is wrong with which file


def locate(target: Path | None, pins: Mapping[str, Pin], to_revert: bool = False) -> Installed:
    """The vLLM in ``target``, or the one that this interpreter would import (without importing it).

    With ``to_revert``, a version that is not pinned is taken if a record says that it was patched: the record has the
    original bytes, so its pin names no files.
    """
    root = target or _site_packages()
    if not (root / "vllm" / "__init__.py").is_file():
        raise PatchError(
            f"vllm is not installed in {root}; install it, or name its folder with --target", EXIT_NOT_INSTALLED
        )
    names = {wheel.distribution for pin in pins.values() for wheel in pin.wheels}
    found = {
        (name, dist.version)
        for dist in importlib.metadata.distributions(path=[str(root)])
        if (name := (dist.metadata["Name"] or "").lower().replace("_", "-")) in names
    }
    if len(found) != 1:
        seen = " and ".join(f"{name} {version}" for name, version in sorted(found)) or "no metadata of vllm"
        raise PatchError(
            f"{seen} in {root}; expected exactly one of: {', '.join(sorted(names))}; reinstall vLLM", EXIT_NOT_INSTALLED
        )
    [(name, version)] = found
    pin = pins.get(version.split("+")[0])
    if pin is None and to_revert and (root / RECORD).is_file():
        return Installed(root, name, Pin(version.split("+")[0], (), {}))
    if pin is None or name not in {wheel.distribution for wheel in pin.wheels}:
        raise PatchError(f"{name} {version} is not supported; {choose(pins, version, name)}", EXIT_UNSUPPORTED)
    return Installed(root, name, pin)


def _site_packages() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise PatchError(
            "vllm is not installed for this interpreter; install it, or use --target DIR", EXIT_NOT_INSTALLED
        )
    return Path(spec.origin).parent.parent


@contextlib.contextmanager
def locked(tree: Installed, warn: Callable[[str], None], shared: bool = False) -> Iterator[None]:
    """Lock a tree, by its folder so that no lock file remains. Waits for another command and warns that it does."""
    folder = os.open(tree.root, os.O_RDONLY)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        try:
            fcntl.flock(folder, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            warn(f"another packed-kv-patch works on {tree.root}; waiting")
            fcntl.flock(folder, kind)
        except OSError as error:  # some network file systems
            warn(f"{tree.root} cannot be locked ({error.strerror}); run one packed-kv-patch at a time")
        yield
    finally:
        os.close(folder)


def inspect(tree: Installed) -> Status:
    """Compare every touched file with the pin and with the record."""
    record = _read_record(tree)
    recorded = record["files"] if record else {}
    states: dict[str, str] = {}
    originals: dict[str, bytes] = {}
    for path in sorted({*tree.pin.files, *recorded}):
        entry = recorded.get(path, {})
        content = _read(tree.root / path)
        if content is None:
            states[path] = "missing"
        elif sha256(content) == tree.pin.files.get(path, entry.get("before")):
            states[path], originals[path] = "original", content
        elif sha256(content) == entry.get("after"):
            states[path], originals[path] = "patched", _unpack(entry["original"])
        else:
            states[path] = "changed by hand" if record else "not the pinned file"
    wrong = tuple(f"{path}: {state}" for path, state in states.items() if state not in ("original", "patched"))
    if wrong:
        return Status(State.CHANGED, originals, wrong)
    if "patched" not in states.values():
        return Status(State.UNPATCHED, originals)
    if record and not tree.pin.files:
        return Status(State.PATCHED, originals)
    if record and record["fingerprint"] != tree.pin.fingerprint():
        return Status(State.OUTDATED, originals)
    if "original" in states.values():
        return Status(State.PARTIAL, originals, tuple(f"{path}: {state}" for path, state in states.items()))
    return Status(State.PATCHED, originals)


def apply(tree: Installed, status: Status) -> None:
    """Write the patched files and the record of an unchanged tree, or leave all as it was."""
    originals = {path: status.originals[path] for path in tree.pin.files}
    patched = tree.pin.patched(originals)
    record = {
        "version": tree.pin.version,
        "distribution": tree.distribution,
        "series": tree.pin.series(),
        "fingerprint": tree.pin.fingerprint(),
        "files": {
            path: {"before": sha256(old), "after": sha256(patched[path]), "original": _pack(old)}
            for path, old in originals.items()
        },
    }
    # Files that only an older revision of the series touched go back to their original bytes.
    text = json.dumps(record, indent=1).encode()
    replace_all({tree.record_path: text} | {tree.root / p: c for p, c in {**status.originals, **patched}.items()})


def revert(tree: Installed, status: Status) -> None:
    """Restore the original bytes, then remove the record."""
    for path, content in status.originals.items():
        if path in tree.pin.files and sha256(content) != tree.pin.files[path]:
            raise PatchError(f"the record's original of {path} is damaged; reinstall {tree.distribution}", EXIT_CHANGED)
    replace_all({tree.root / path: content for path, content in status.originals.items()})
    tree.record_path.unlink(missing_ok=True)


def replace_all(contents: Mapping[Path, bytes]) -> None:
    """Replace files together: all of them, or, if one fails, none. Files that are already right stay untouched."""
    before = {path: _read(path) for path in contents}
    todo = {path: content for path, content in contents.items() if before[path] != content}
    staged: dict[Path, Path] = {}
    done: list[Path] = []
    try:
        for path, content in todo.items():
            staged[path] = _stage(path, content)
        for path, temporary in staged.items():
            done.append(path)
            os.replace(temporary, path)
            _drop_bytecode(path)
    except BaseException:  # an interrupt too must leave nothing half done; raised again below
        for path in reversed(done):
            original = before[path]
            if original is None:
                path.unlink(missing_ok=True)
            elif _read(path) != original:
                os.replace(_stage(path, original), path)
                _drop_bytecode(path)
        raise
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _stage(path: Path, content: bytes) -> Path:
    """Write ``content`` beside ``path``: renaming it breaks a hard link into a package cache, writing follows it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        if path.exists():
            shutil.copymode(path, name)
        else:
            os.chmod(name, 0o644)
    except BaseException:  # an interrupt too must leave nothing half done; raised again below
        os.unlink(name)
        raise
    return Path(name)


def _drop_bytecode(path: Path) -> None:
    """Python trusts bytecode whose source has the same size and time, or that was compiled unchecked."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _read_record(tree: Installed) -> dict[str, Any] | None:
    """The record of this version. A record left by another version that has been replaced is ignored."""
    text = _read(tree.record_path)
    if text is None:
        return None
    try:
        record: dict[str, Any] = json.loads(text)
        if record["version"] != tree.pin.version:
            return None
        for path, entry in record["files"].items():
            if PurePosixPath(path).parts[:1] != ("vllm",) or ".." in PurePosixPath(path).parts or "\0" in path:
                raise ValueError("path outside of the package")
            if sha256(_unpack(entry["original"])) != entry["before"]:
                raise ValueError("checksum")
        return record
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise PatchError(
            f"{tree.record_path} is damaged; remove it and reinstall {tree.distribution}", EXIT_CHANGED
        ) from error


def _pack(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode()


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
