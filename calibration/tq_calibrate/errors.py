"""Errors that a user can fix."""

from __future__ import annotations

import re

from packed_kv.calibration_file import heads_in_words


class UserError(Exception):
    """Bad input; the message is one line that names the value and the remedy. `main` prints it and exits with 2."""


class UnsupportedError(UserError):
    """A model that transformers does not know or cannot load, though another engine may."""


def differ(
    layer: int, heads: int, size: int, value: int, other: int, heads_of: int, size_of: int, value_of: int
) -> str:
    """Return the error for two layers with different head sizes. Arguments per layer: KV heads, channels of K and of
    V."""
    first, second = heads_in_words([heads], size, value), heads_in_words([heads_of], size_of, value_of)
    return (
        f"layers differ in shape (layer {layer}: {first}, layer {other}: {second}); a calibration file holds one size; "
        "use tq4, which needs no file"
    )


def first_line(error: BaseException) -> str:
    """The first line of another library's error that says anything, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and re.match(r"\d+ validation errors? for ", lines[0]):  # pydantic: where, then what
        lines = [lines[1].removeprefix("Value error, ").partition(" [type=")[0]]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
