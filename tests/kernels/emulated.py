"""Run the CUDA kernels on a CPU: g++ compiles it with an emulation of its instructions (emulator/ptx.cuh)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from packed_kv.kernels.cuda import grids, latent_launch, latent_ring_launch, launch, prefix_launch
from packed_kv.kernels.cuda.source import LATENT, LATENT_RING, Source, read_sources

FOLDER = Path(__file__).parent / "emulator"


@cache
def build(source: Source, main: str, constants: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    """Return the emulated kernel with these definitions, launched by `main`; builds are kept for later runs."""
    sources = read_sources(source) | {path.name: path.read_text() for path in FOLDER.iterdir()}  # with another ptx.cuh
    key = hashlib.sha256(repr((main, constants, sorted(sources.items()))).encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"packed_kv_emulator_{os.getuid()}"
    library = kept / f"{key}.so"
    if not library.exists():
        kept.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as made:  # other processes may build the same
            folder = Path(made)
            for name, text in sources.items():
                (folder / name).write_text(text)
            subprocess.run(
                ["g++", "-O1", "-std=c++20", "-mf16c", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE",
                 *(f"-D{name}={value}" for name, value in constants), "-o", "kernel.so", main],
                cwd=folder, check=True,
            )  # fmt: skip
            os.replace(folder / "kernel.so", library)
    return ctypes.CDLL(str(library))


def run(
    constants: dict[str, str], blocks: tuple[int, int, int], output: torch.Tensor, step: bytes, layer: bytes
) -> None:
    """Run a variant on tensors on the CPU.

    Args:
        constants: of `launch.constants`.
        blocks: the grid.
        output: see `CudaDecode`.
        step: of `step_arguments`.
        layer: of `layer_arguments`.
    """
    arguments = launch.CALL_ARGUMENTS.pack(output.data_ptr()) + step + layer
    build(launch.source_of(constants), "launch.cpp", tuple(constants.items())).launch(arguments, *blocks)


class CudaDecode(launch.CudaDecode):
    """Runs `decode.cu` on tensors on the CPU."""

    def __call__(self, shape: grids.Grid, max_query_len: int, requests: int, step: bytes, output: torch.Tensor) -> None:
        values = dict(self.compilation((shape.warps, shape.is_final, max_query_len)).constants)
        passes = grids.pass_count(self.group, max_query_len)
        x, z = (1, shape.blocks) if shape.is_final else (shape.blocks, requests * passes)
        run(values, (x, self.kv_heads, z), output, step, bytes(self.arguments[self.layer_at :]))

    def compile_variants(self, longest_decode: int) -> None:
        pass


class CudaPrefix(prefix_launch.CudaPrefix):
    """Runs `decode.cu` over prefixes on tensors on the CPU."""

    def __call__(self, items: int, step: bytes, output: torch.Tensor) -> None:
        values = launch.constants(self.page, self.kv_heads, self.group, self.variant)
        run(values, (1, self.kv_heads, items), output, step, bytes(self.arguments[self.layer_at :]))

    def compile_variants(self) -> None:
        pass


def run_latent(constants: dict[str, str], call: bytes, step: latent_launch.Step, layer: bytes, heads: int) -> None:
    """Run `latent.cu` on tensors on the CPU.

    Args:
        constants: of `latent_launch.constants`.
        call, layer: of `latent_launch.call_arguments` and `layer_arguments`.
        step: of `make_step`.
        heads: query heads.
    """
    blocks = (step.grid.row_blocks, step.grid.partitions, heads * step.max_query_len, step.requests)
    build(LATENT, "latent.cpp", tuple(constants.items())).launch(call + step.arguments + layer, *blocks)


class CudaLatentRing(latent_ring_launch.CudaLatentRing):
    """Runs `latent_ring.cu` on tensors on the CPU."""

    def __call__(
        self, step: latent_ring_launch.Step, query: torch.Tensor, rope_query: torch.Tensor, output: torch.Tensor
    ) -> None:
        constants = latent_ring_launch.constants(self.variant(step.grid[2]))
        arguments = latent_launch.call_arguments(output, query, rope_query) + step.arguments + self.layer
        build(LATENT_RING, "latent_ring.cpp", tuple(constants.items())).launch(arguments, *step.grid)

    def compile_variants(self) -> None:
        pass
