"""CSV files of rows, written anew and whole."""

from __future__ import annotations

import csv
import io
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from packed_kv.private_file import replace_file


def add_options(parser: ArgumentParser) -> None:
    """Options of a command that writes rows."""
    add = parser.add_argument
    add("--rows", type=Path, metavar="FILE", help="CSV of all rows, written anew")
    add("--beside", nargs="+", default=[], type=column, metavar="COLUMN=TEXT",
        help="of each of the rows, such as commit=1234abcd")  # fmt: skip


def column(text: str) -> tuple[str, str]:
    """Raises ValueError unless the text is NAME=VALUE, a column and its content."""
    name, equals, cell = text.partition("=")
    if not name or not equals:
        raise ValueError(text)
    return name, cell


def write(file: Path, rows: Sequence[Mapping[str, object]], beside: Sequence[tuple[str, str]]) -> None:
    """Write rows of the same columns, each with those `beside` them. There is at least one row."""
    written = io.StringIO()
    writer = csv.DictWriter(written, [*rows[0], *dict(beside)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dict(row) | dict(beside) for row in rows)
    replace_file(file, written.getvalue().encode())
