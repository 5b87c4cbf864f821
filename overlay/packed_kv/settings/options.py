"""What `--additional-config '{"packed_kv": {...}}'` says, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

KEYS = ("calibration", "recent_tokens", "decode_kernel")
DECODE_KERNELS = ("auto", "triton")
AUTO = "auto"
"""In place of a calibration file's path; `self_calibration.resolve_auto` makes it one before the engine starts."""


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
    if "packed-kv" in additional_config:
        raise OptionError("--additional-config: the key is packed_kv, not packed-kv")
    options = additional_config.get("packed_kv", {})
    if not isinstance(options, dict) or set(options) - set(KEYS):
        raise OptionError(
            f'--additional-config: packed_kv is {options!r}; write {{"packed_kv": {{"calibration": "PATH", '
            '"recent_tokens": N, "decode_kernel": "triton"}} or some of them'
        )
    path, recent = options.get("calibration"), options.get("recent_tokens")
    if "calibration" in options and (not isinstance(path, str) or not path):
        raise OptionError(f'--additional-config: packed_kv.calibration is {path!r}; write "auto" or the path of a file')
    if isinstance(path, str) and re.fullmatch(r"\w+", path) and not Path(path).exists():
        raise OptionError(
            f'--additional-config: packed_kv.calibration is {path!r}, and there is no such file; write "auto" or the '
            "path of a file"
        )
    if "recent_tokens" in options and (type(recent) is not int or recent < 0):
        raise OptionError(
            f"--additional-config: packed_kv.recent_tokens is {recent!r}; write a whole number, or 0 for no window"
        )
    kernel = options.get("decode_kernel", "auto")
    if kernel not in DECODE_KERNELS:
        raise OptionError(f'--additional-config: packed_kv.decode_kernel is {kernel!r}; write "auto" or "triton"')
    return Options(Path(path).expanduser() if isinstance(path, str) else None, recent, kernel)
