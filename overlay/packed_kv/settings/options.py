"""Options of `--additional-config '{"packed_kv": {...}}'`, checked."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..formats import ROPE_BITS
from ..json_file import printable

KEY = "packed_kv"
KEYS = {
    "calibration": '"auto" or "PATH"',
    "recent_tokens": "N",
    "decode_kernel": '"auto", "triton" or "cuda"',
    "latent_rope_bits": " or ".join(map(str, ROPE_BITS)),
    "mixed_graphs": "true or false",
}
"""Keys of the options, with their values in words."""
DECODE_KERNELS = ("auto", "triton", "cuda")
AUTO = "auto"
"""Word instead of a calibration file's path; `self_calibration.resolve_auto` replaces it by a path before the engine
starts."""

LONGEST_PATH = 4095
MOST = sys.maxsize
"""Sanity limit of a number of tokens, so that later lines can print it; the real limit is the model's context."""
LIKE = 0.9
"""Least likeness to `KEY` at which another key is taken for a typo; "packed" is below it."""


class OptionError(ValueError):
    """An invalid option; the message is one line that names it and the remedy."""


@dataclass(frozen=True)
class Options:
    """`calibration`: the file to use, or None: that of the model's folder. `recent_tokens`: tokens of the recent
    window, 0: none, or None: not said. `decode_kernel`: "triton"; "auto": the CUDA kernel where it serves and is
    tested; or "cuda": refuse to start without it.
    `latent_rope_bits`: bits of RoPE channels beside latents (MLA), one of `ROPE_BITS`. `mixed_graphs`: whether steps
    with prompts run as whole CUDA graphs where they can."""

    calibration: Path | None = None
    recent_tokens: int | None = None
    decode_kernel: str = "auto"
    latent_rope_bits: int = ROPE_BITS[0]
    mixed_graphs: bool = True


def read_options(additional_config: object) -> Options:
    """The options of an engine. Raises OptionError."""
    if not isinstance(additional_config, dict):
        return Options()
    for key in additional_config:
        if key != KEY and get_close_matches(_letters(key), [_letters(KEY)], cutoff=LIKE):
            raise OptionError(f"--additional-config: the key is {KEY}, not {_shown(key)}")
        if key in KEYS:
            raise OptionError(f'--additional-config: {key} belongs into packed_kv; write {{"{KEY}": {{"{key}": ...}}}}')
    options = additional_config.get(KEY, {})
    if not isinstance(options, dict):
        values = ", ".join(f'"{name}": {value}' for name, value in KEYS.items())
        raise OptionError(
            f"--additional-config: packed_kv is {_shown(options)}; write an object with some of: {values}"
        )
    for key in options:
        if key not in KEYS:
            letters = {_letters(name): name for name in KEYS}
            near = [letters[found] for found in get_close_matches(_letters(key), letters)]
            hint = " or ".join(near) if near else f"one of {', '.join(KEYS)}"
            raise OptionError(f"--additional-config: packed_kv has no option {_shown(key)}; write {hint}")
    path, recent = options.get("calibration"), options.get("recent_tokens")
    if "calibration" in options and (
        not isinstance(path, str) or not path or len(path) > LONGEST_PATH or not path.isprintable()
    ):
        said = f"--additional-config: packed_kv.calibration is {_shown(path)}"
        raise OptionError(f'{said}; write "auto" or the path of a file')
    if "recent_tokens" in options and (type(recent) is not int or not 0 <= recent <= MOST):
        said = f"--additional-config: packed_kv.recent_tokens is {_shown(recent)}"
        raise OptionError(f"{said}; write a whole number, or 0 for no window")
    kernel = options.get("decode_kernel", "auto")
    if kernel not in DECODE_KERNELS:
        said = f"--additional-config: packed_kv.decode_kernel is {_shown(kernel)}"
        raise OptionError(f"{said}; write {KEYS['decode_kernel']}")
    rope_bits = options.get("latent_rope_bits", ROPE_BITS[0])
    if type(rope_bits) is not int or rope_bits not in ROPE_BITS:
        said = f"--additional-config: packed_kv.latent_rope_bits is {_shown(rope_bits)}"
        raise OptionError(f"{said}; write {KEYS['latent_rope_bits']}")
    mixed_graphs = options.get("mixed_graphs", True)
    if type(mixed_graphs) is not bool:
        said = f"--additional-config: packed_kv.mixed_graphs is {_shown(mixed_graphs)}"
        raise OptionError(f"{said}; write {KEYS['mixed_graphs']}")
    file = Path(os.path.expanduser(path)) if isinstance(path, str) else None
    return Options(file, recent, kernel, rope_bits, mixed_graphs)


def given_options(additional_config: object) -> dict[str, Any]:
    """The options of an engine that are given, as they are written. Raises OptionError."""
    read_options(additional_config)
    return additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}


def check_files(options: Options) -> None:
    """Raise OptionError if a file that the options name is not there. For the host where the engine starts."""
    path = options.calibration
    if path is not None and str(path) != AUTO and not os.path.isfile(path):  # Path's raises where a name is too long
        said = f"--additional-config: packed_kv.calibration is {_shown(str(path))}, and there is no such file"
        raise OptionError(f'{said}; write "auto", or the path of a file (made with: tq-calibrate model MODEL)')


def _shown(value: object) -> str:
    try:
        return printable(repr(value), 120)
    except ValueError:  # Python's limit
        return "a number of too many digits" if isinstance(value, int) else "a value with a number of too many digits"


def _letters(key: object) -> str:
    """A key in small letters and digits alone."""
    return "".join(letter for letter in str(key).lower() if letter.isalnum())
