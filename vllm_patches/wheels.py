"""Dry runs of a series against the wheel that it was made for, in memory."""

import ast
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from .pins import PatchError, Pin, Wheel, sha256
from .survey import Tree

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_34_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64")  # fmt: skip
PYTHON = "3.12"


def check(
    pin: Pin, wheel: Wheel, wheels: Path | None, names: Callable[[Tree, str], Iterable[str]] = lambda tree, version: ()
) -> list[str]:
    """Every fault of the series on this wheel, which is found below ``wheels`` or downloaded, and those of its
    ``names``."""

    def faults(path: Path) -> list[str]:
        return _check_file(pin, wheel, path) or list(names(Tree(path), pin.version))

    if wheels is not None:
        found = sorted(wheels.rglob(wheel.file))
        return faults(found[0]) if found else [f"{wheel.file}: not found below {wheels}"]
    with tempfile.TemporaryDirectory(prefix="packed-kv-patch-") as folder:
        return faults(download(f"{wheel.distribution}=={pin.version}", Path(folder)))


def download(requirement: str, folder: Path) -> Path:
    """The wheel of ``DISTRIBUTION==VERSION``, put into ``folder``. Raises PatchError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
               "--python-version", PYTHON, "--dest", str(folder)]  # fmt: skip
    command += [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    result = subprocess.run([*command, requirement], capture_output=True, text=True)
    files = sorted(folder.glob("*.whl"))
    if result.returncode or not files:
        reason = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise PatchError(f"pip cannot download {requirement}: {reason[-1] if reason else result.stderr.strip()}")
    return files[0]


def _check_file(pin: Pin, wheel: Wheel, path: Path) -> list[str]:
    if path.name != wheel.file:
        return [f"{wheel.distribution} {pin.version}: expected {wheel.file}, got {path.name}"]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        return [f"{wheel.file}: sha256 is {digest}, pinned is {wheel.sha256}"]
    with zipfile.ZipFile(path) as archive:
        missing = sorted(set(pin.files) - set(archive.namelist()))
        if missing:
            return [f"{wheel.file}: has no {name}" for name in missing]
        originals = {name: archive.read(name) for name in pin.files}
    faults = [
        f"{wheel.file}: {name} has sha256 {sha256(content)}, pinned is {pin.files[name]}"
        for name, content in originals.items()
        if sha256(content) != pin.files[name]
    ]
    return faults or _check_result(pin, wheel, originals)


def _check_result(pin: Pin, wheel: Wheel, originals: dict[str, bytes]) -> list[str]:
    faults = []
    try:
        for name, content in pin.patched(originals).items():
            try:
                ast.parse(content, name)
            except SyntaxError as error:
                faults.append(f"{wheel.file}: patched {name}:{error.lineno}: {error.msg}")
    except PatchError as error:
        faults.append(f"{wheel.file}: {error}")
    return faults
