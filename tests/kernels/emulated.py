"""The CUDA kernel on a CPU: compiled by g++ with an emulation of the instructions (emulator/ptx.cuh)."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from packed_kv.kernels.cuda import launch
from packed_kv.kernels.cuda.source import read_sources

FOLDER = Path(__file__).parent / "emulator"


@cache
def build(constants: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    folder = Path(tempfile.gettempdir()) / "packed_kv_emulator"
    sources = read_sources() | {path.name: path.read_text() for path in FOLDER.iterdir()}  # with another ptx.cuh
    folder /= hashlib.sha256(repr((constants, sorted(sources.items()))).encode()).hexdigest()[:16]
    library = folder / "decode.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in sources.items():
            (folder / name).write_text(text)
        subprocess.run(
            ["g++", "-O1", "-std=c++20", "-mf16c", "-shared", "-fPIC", "-w",
             *(f"-D{name}={value}" for name, value in constants), "-o", library, folder / "launch.cpp"],
            check=True,
        )  # fmt: skip
    return ctypes.CDLL(str(library))


def run(
    constants: dict[str, str], blocks: tuple[int, int, int], output: torch.Tensor, step: bytes, layer: bytes
) -> None:
    """Run a variant; `step` and `layer`: arguments on the CPU."""
    arguments = launch.CALL_ARGUMENTS.pack(output.data_ptr()) + step + layer
    build(tuple(constants.items())).launch(arguments, *blocks)
