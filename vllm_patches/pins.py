"""Pins: the vLLM versions of versions.toml, each with its wheels, touched files and series of patches."""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import diff

ROOT = Path(__file__).parent
SERVED_UP_TO = {"0.28.0": "02bbd23", "0.26.0": "edb2ffc"}
"""Versions of vLLM that are patched no longer -> the last commit of packed-kv that patches them."""
HEADER_FIELDS = ("Subject:", "Concern:", "Why a patch:", "Drop when:")


class PatchError(Exception):
    """An error to show to the user in one line; ``exit_code`` ends the command."""

    def __init__(self, message: str, exit_code: int = 1):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Wheel:
    distribution: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Pin:
    version: str
    wheels: tuple[Wheel, ...]
    files: Mapping[str, str]  # path below site-packages -> sha256 before patching
    root: Path = ROOT

    @property
    def folder(self) -> Path:
        return self.root / f"v{self.version}"

    def series(self) -> list[str]:
        """The names of the patches, in the order in which they are applied."""
        lines = (self.folder / "series").read_text().splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    def fingerprint(self) -> str:
        """A sha256 of the whole series, to tell one revision of it from another."""
        return sha256(b"".join((self.folder / name).read_bytes() for name in self.series()))

    def patched(self, originals: Mapping[str, bytes]) -> dict[str, bytes]:
        """The touched files after the whole series, from their original bytes."""
        contents = dict(originals)
        for name in self.series():
            try:
                for change in diff.parse((self.folder / name).read_bytes())[1]:
                    contents[change.path] = diff.apply(change, contents[change.path])
            except (diff.DiffError, KeyError) as error:
                raise PatchError(f"v{self.version}/{name}: {error}") from error
        return contents


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def load(root: Path = ROOT) -> dict[str, Pin]:
    """The pins of versions.toml, by version."""
    table = tomllib.loads((root / "versions.toml").read_text())
    return {
        entry["version"]: Pin(entry["version"], tuple(Wheel(**w) for w in entry["wheel"]), entry["files"], root)
        for entry in table["version"]
    }


def choose(pins: Mapping[str, Pin], version: str, distribution: str = "vllm") -> str:
    """Say what to do about a version that is not patched: the commit of packed-kv that serves it, if there is one, the
    versions that are patched, and the nearest of this distribution."""
    wheels = [f"{wheel.distribution}=={pin.version}" for pin in pins.values() for wheel in pin.wheels]
    own = [pin for pin in pins.values() if distribution in {wheel.distribution for wheel in pin.wheels}]
    nearest = min(own, key=lambda pin: abs(_number(pin.version) - _number(version)))
    commit = SERVED_UP_TO.get(version.split("+")[0])
    former = f"packed-kv serves it up to commit {commit}; here, " if commit else ""
    return f"{former}install one of: {', '.join(wheels)} (nearest: {distribution}=={nearest.version})"


def _number(version: str) -> int:
    """A version as one number, to tell which are near: 0.34.1.dev3+cpu is 34,001."""
    major, minor, patch, *_ = [*map(int, re.findall(r"\d+", version.split("+")[0])), 0, 0, 0]
    return (major * 1000 + minor) * 1000 + patch


def lint(root: Path = ROOT) -> list[str]:
    """Every fault that can be seen without a wheel, one line each."""
    pins = load(root)
    folders = {f"v{version}" for version in pins}
    faults = [f"{path.name}: not in versions.toml" for path in sorted(root.glob("v[0-9]*")) if path.name not in folders]
    for pin in pins.values():
        faults += _lint_series(pin)
    return faults


def _lint_series(pin: Pin) -> list[str]:
    if not (pin.folder / "series").is_file():
        return [f"v{pin.version}: no file 'series'"]
    label = f"v{pin.version}"
    series = pin.series()
    faults = [f"{label}/series: {name} is listed twice" for name in sorted({n for n in series if series.count(n) > 1})]
    unused = {path.name for path in pin.folder.glob("*.patch")} - set(series)
    faults += [f"{label}/{name}: not in series" for name in sorted(unused)]
    touched: set[str] = set()
    for name in dict.fromkeys(series):
        if not (pin.folder / name).is_file():
            faults.append(f"{label}/{name}: in series, but there is no such file")
            continue
        try:
            header, changes = diff.parse((pin.folder / name).read_bytes())
        except diff.DiffError as error:
            faults.append(f"{label}/{name}: {error}")
            continue
        lines = header.splitlines()
        missing = [field for field in HEADER_FIELDS if not any(line.startswith(field) for line in lines)]
        faults += [f"{label}/{name}: no '{field}' in the header" for field in missing]
        touched |= {change.path for change in changes}
    faults += [f"{label}: {path} is patched but not pinned" for path in sorted(touched - set(pin.files))]
    faults += [f"{label}: {path} is pinned but not patched" for path in sorted(set(pin.files) - touched)]
    return faults
