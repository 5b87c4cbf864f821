"""Reads JSON that somebody else wrote, and shows it in one line. Imports no torch and no vLLM."""

from __future__ import annotations

import json
import os
from typing import Any

from .private_file import NotRegular, open_regular

LARGEST_FILE = 64 << 20
"""Limit in bytes. A calibration file of 80 layers with 64 KV heads has 40 MB, an index of 160,000 tensors 13 MB."""


def read_json(path: str | os.PathLike[str], once: bool = False) -> Any:
    """The content of a regular file of at most `LARGEST_FILE` bytes. Raises ValueError, with a reason of one line.

    once: refuse an object that has a name twice; JSON's readers would take the last value.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_FILE:
                raise ValueError(f"has {size:,} bytes, more than the {LARGEST_FILE:,} that are read")
            text = file.read(LARGEST_FILE)
    except NotRegular as error:
        raise ValueError("is not a regular file") from error
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_once if once else None)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and numbers of 4,300 digits are ValueErrors
        raise ValueError(f"is not JSON ({printable(error)})") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} is there twice")
        found[name] = value
    return found


def printable(text: object, most: int = 200) -> str:
    """A text in one line, without control characters and of at most `most` characters."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text)[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def shown(value: Any) -> str:
    """A value of JSON in one short line; long or nested lists and objects are shown as their number of entries."""
    if isinstance(value, dict | list):
        entries = value.values() if isinstance(value, dict) else value
        if len(value) > 8 or any(isinstance(entry, dict | list) for entry in entries):
            return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    return printable(json.dumps(value), 60)
