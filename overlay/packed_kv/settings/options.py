"""What `--additional-config '{"packed_kv": {...}}'` says, checked."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..json_file import printable

KEY = "packed_kv"
KEYS = ("calibration", "recent_tokens", "decode_kernel")
DECODE_KERNELS = ("auto", "triton")
AUTO = "auto"
"""In place of a calibration file's path; `self_calibration.resolve_auto` makes it one before the engine starts."""


LONGEST_PATH = 4095


class OptionError(ValueError):
    """An invalid option; the message is one line that names it and the remedy."""


@dataclass(frozen=True)
class Options:
    """`calibration`: the file to use, or None: that of the model's folder. `recent_tokens`: tokens of the recent
    window, 0: none, or None: not said. `decode_kernel`: "triton", or "auto": the CUDA kernel where it serves."""

    calibration: Path | None = None
    recent_tokens: int | None = None
    decode_kernel: str = "auto"


def read_options(additional_config: object) -> Options:
    """The options of an engine. Raises OptionError."""
    if not isinstance(additional_config, dict):
        return Options()
    for key in additional_config:
        if key != KEY and _letters(key) == _letters(KEY):
            raise OptionError(f"--additional-config: the key is {KEY}, not {printable(repr(key), 60)}")
    options = additional_config.get(KEY, {})
    if not isinstance(options, dict) or set(options) - set(KEYS):
        raise OptionError(
            f'--additional-config: packed_kv is {_shown(options)}; write {{"packed_kv": {{"calibration": "PATH", '
            '"recent_tokens": N, "decode_kernel": "triton"}} or some of them'
        )
    path, recent = options.get("calibration"), options.get("recent_tokens")
    said = f"--additional-config: packed_kv.calibration is {_shown(path)}"
    if "calibration" in options and (
        not isinstance(path, str) or not path or len(path) > LONGEST_PATH or not path.isprintable()
    ):
        raise OptionError(f'{said}; write "auto" or the path of a file')
    if isinstance(path, str) and path != AUTO and re.fullmatch(r"\w+", path) and not os.path.exists(path):
        raise OptionError(f'{said}, and there is no such file; write "auto" or the path of a file')
    if "recent_tokens" in options and (type(recent) is not int or recent < 0):
        said = f"--additional-config: packed_kv.recent_tokens is {_shown(recent)}"
        raise OptionError(f"{said}; write a whole number, or 0 for no window")
    kernel = options.get("decode_kernel", "auto")
    if kernel not in DECODE_KERNELS:
        raise OptionError(f'--additional-config: packed_kv.decode_kernel is {_shown(kernel)}; write "auto" or "triton"')
    return Options(Path(path).expanduser() if isinstance(path, str) else None, recent, kernel)


def _shown(value: object) -> str:
    return printable(repr(value), 120)


def _letters(key: object) -> str:
    """A key without case, blanks, dashes and underscores."""
    return "".join(letter for letter in str(key).lower() if letter.isalnum())
