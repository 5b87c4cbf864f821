"""The CUDA kernel against the reference of the Triton one; on a Hopper GPU, else emulated on the CPU by g++."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import test_decode as decode_tests
import test_ring as ring_tests
import torch
from machine_code import dump, resources
from packed_kv.formats import FORMATS
from packed_kv.gpu_generations import generation_of
from packed_kv.kernels.cuda import COLUMNS, pass_tokens, runs_on
from packed_kv.kernels.cuda.grids import (
    COLUMN_COUNTS,
    LARGE_REGISTERS,
    Grid,
    GridInputs,
    block_kind,
    block_kinds,
    column_count,
    columns_of_steps,
    grid,
    has_unpackers,
    make_schedulers,
    pass_count,
)
from packed_kv.kernels.cuda.kernel import Compilation, block_of, machine_code
from packed_kv.kernels.cuda.launch import PairVariant, constants, source_of
from packed_kv.layout import page_layout
from test_decode import BOUND, DEVICE, relative_rms, transforms
from variants import half

KERNEL = "cuda emulated" if DEVICE == "cpu" else "cuda"
if DEVICE == "cpu":
    runs = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
else:
    unfit = not runs_on(torch.cuda.get_device_capability())
    runs = pytest.mark.skipif(unfit, reason="needs a GPU of compute capability 9.0")
on_gpu = pytest.mark.skipif(
    DEVICE == "cpu", reason="the emulator takes seconds for each, and the other cases cover the kernel's code"
)


def gpu_only(**options: Any) -> Any:
    return pytest.param(options, marks=on_gpu)


@runs
@pytest.mark.parametrize(
    "options",
    [
        {"name": "isoquant4", "seq_lens": (1, 37, 300)},
        {"name": "turboquant25", "head_dim": 64, "kv_heads": 1, "group": 2, "query_lens": (4, 0, 3),
         "seq_lens": (9, 5, 70), "block_size": 32, "splits": Grid(1, 5, False)},
        {"name": "isoquant3", "head_dim": 64, "kv_heads": 1, "group": 7, "seq_lens": (70,), "block_size": 48},
        # Requests in two parts, in three, and whole.
        {"name": "isoquant4", "head_dim": 64, "kv_heads": 1, "seq_lens": (1100, 1700, 40), "splits": Grid(2, 3, True)},
        # More parts than a thread loads at once (AT_ONCE).
        {"name": "isoquant4", "head_dim": 64, "kv_heads": 1, "seq_lens": (9300, 5000), "splits": Grid(2, 18, True)},
        # More than 8 columns: 16, 32, 24, and teams of 64 and 48.
        {"name": "turboquant35", "head_dim": 64, "kv_heads": 1, "group": 16, "seq_lens": (1, 100)},
        {"name": "isoquant4", "head_dim": 64, "kv_heads": 1, "group": 3, "query_lens": (4, 1, 0),
         "seq_lens": (1100, 40, 9), "splits": Grid(2, 3, True)},
        {"name": "turboquant25", "head_dim": 64, "kv_heads": 1, "group": 8, "query_lens": (3, 0, 4),
         "seq_lens": (300, 5, 33), "splits": Grid(1, 10, False)},
        {"name": "turboquant35", "head_dim": 64, "kv_heads": 1, "group": 6, "query_lens": (4, 1, 0),
         "seq_lens": (1100, 40, 9), "splits": Grid(4, 3, True)},
        {"name": "tq4", "kv_heads": 1, "group": 12, "query_lens": (2, 1), "seq_lens": (300, 70),
         "splits": Grid(1, 4, False)},
        {"name": "tq4", "kv_heads": 1, "group": 16, "query_lens": (2, 1), "seq_lens": (1100, 70),
         "splits": Grid(4, 2, True)},
        {"name": "isoquant3", "kv_heads": 1, "group": 16, "query_lens": (4, 3), "seq_lens": (2100, 70),
         "splits": Grid(4, 2, True)},
        {"name": "turboquant25", "head_dim": 64, "kv_heads": 1, "group": 6, "query_lens": (8, 1), "seq_lens": (300, 70),
         "splits": Grid(2, 3, True)},
        {"name": "isoquant3", "kv_heads": 1, "group": 12, "query_lens": (4, 3), "seq_lens": (700, 70),
         "splits": Grid(4, 2, False)},
        # A warpgroup that attends and one that unpacks.
        {"name": "isoquant4", "kv_heads": 1, "group": 16, "query_lens": (4, 3), "seq_lens": (1100, 70),
         "splits": Grid(4, 2, True)},
        # Its V is lifted where all scales of 16 tokens are small: of all tokens, and of some.
        {"name": "isoquant4", "kv_heads": 1, "group": 16, "query_lens": (2,), "seq_lens": (300,), "size": 1e-5,
         "dtype": torch.float32, "splits": Grid(4, 2, True)},
        {"name": "tq4", "kv_heads": 1, "group": 16, "query_lens": (4,), "seq_lens": (700,), "splits": Grid(4, 2, True),
         "size": (2e-3, 1.0, 2e-3, 2e-3, 100.0)},
        # Passes: a request of three, of one, of none; one part has tiles of some passes only.
        {"name": "isoquant4", "head_dim": 64, "kv_heads": 1, "group": 12, "query_lens": (13, 2, 0),
         "seq_lens": (1037, 40, 9), "splits": Grid(2, 4, True)},
        {"name": "tq3", "head_dim": 64, "kv_heads": 1, "group": 24, "query_lens": (3, 1), "seq_lens": (137, 40),
         "splits": Grid(2, 3, True)},
        # Heads of 256: each query twice, and once.
        {"name": "turboquant25", "head_dim": 256, "kv_heads": 1, "group": 2, "query_lens": (2, 0, 1),
         "seq_lens": (9, 5, 70), "block_size": 32, "splits": Grid(1, 5, False)},
        {"name": "tq4", "head_dim": 256, "kv_heads": 1, "group": 6, "seq_lens": (1100, 37, 0, 1),
         "splits": Grid(4, 2, True)},
        {"name": "tq3", "head_dim": 256, "kv_heads": 1, "group": 3, "seq_lens": (300, 16), "dtype": torch.float32},
        # Teams over heads of 256: 16, 24, 32, 48 and 64 columns, and two passes.
        {"name": "turboquant35", "head_dim": 256, "kv_heads": 1, "group": 6, "query_lens": (2, 1, 0),
         "seq_lens": (700, 40, 9), "splits": Grid(2, 2, True)},
        {"name": "tq4", "head_dim": 256, "kv_heads": 1, "group": 6, "query_lens": (4, 1), "seq_lens": (1100, 70),
         "splits": Grid(4, 3, True)},
        {"name": "tq3", "head_dim": 256, "kv_heads": 1, "group": 6, "query_lens": (5, 0, 2), "seq_lens": (300, 5, 33),
         "splits": Grid(8, 2, False)},
        {"name": "tq4", "head_dim": 256, "kv_heads": 1, "group": 6, "query_lens": (8, 1), "seq_lens": (300, 9),
         "splits": Grid(8, 2, True)},
        {"name": "turboquant25", "head_dim": 256, "kv_heads": 1, "group": 16, "query_lens": (5, 1),
         "seq_lens": (300, 5), "splits": Grid(8, 2, True)},
        # The maximum of the last column moves alone: of a warp's 24, and of teams'.
        {"name": "tq4", "head_dim": 64, "kv_heads": 1, "group": 6, "query_lens": (4,), "seq_lens": (700,),
         "splits": Grid(4, 2, True), "sharp": (3, 5)},
        {"name": "tq4", "head_dim": 64, "kv_heads": 1, "group": 16, "query_lens": (4,), "seq_lens": (700,),
         "splits": Grid(2, 2, True), "sharp": (3, 15)},
        {"name": "tq4", "head_dim": 256, "kv_heads": 1, "group": 6, "query_lens": (4,), "seq_lens": (700,),
         "splits": Grid(4, 2, True), "sharp": (3, 5)},
        gpu_only(name="tq4", head_dim=256, kv_heads=4, group=6, seq_lens=(9000, 4097), splits=Grid(4, 99, True)),
        gpu_only(name="tq4", head_dim=256, kv_heads=4, group=6, query_lens=(4, 2), seq_lens=(9000, 4097),
                 splits=Grid(4, 66, True)),
        gpu_only(name="turboquant25", head_dim=256, kv_heads=4, group=6, query_lens=(10, 3), seq_lens=(9000, 33),
                 splits=Grid(8, 33, True)),
        gpu_only(name="tq4", head_dim=256, group=16, query_lens=(1, 1), seq_lens=(3000, 40), size=1e-5,
                 dtype=torch.float32, splits=Grid(2, 9, True)),
        gpu_only(name="tq4", group=16, query_lens=(16, 5), seq_lens=(3000, 100), splits=Grid(4, 66, True)),
        gpu_only(name="turboquant25", group=6, query_lens=(16, 1), seq_lens=(3000, 100), splits=Grid(4, 9, False)),
        gpu_only(name="isoquant3", kv_heads=1, seq_lens=(64, 50)),
        gpu_only(name="tq4", group=16, seq_lens=(9000, 4097), splits=Grid(4, 66, True)),
        gpu_only(name="tq3", group=12, seq_lens=(9000, 33), splits=Grid(4, 132, True)),
        gpu_only(name="turboquant25", group=2, query_lens=(8, 5), seq_lens=(700, 33), splits=Grid(1, 40, False)),
        gpu_only(name="turboquant35", group=8, query_lens=(4, 3, 0), seq_lens=(9000, 33, 20), splits=Grid(4, 49, True)),
        gpu_only(name="isoquant3", group=6, query_lens=(5,), seq_lens=(3000,), splits=Grid(1, 80, False)),
        gpu_only(name="turboquant25", group=16, query_lens=(4, 1), seq_lens=(20000, 33), splits=Grid(4, 33, True)),
        gpu_only(name="tq4", group=4, query_lens=(16, 9), seq_lens=(9000, 4097), splits=Grid(4, 66, True)),
        gpu_only(name="tq4", group=8, query_lens=(8,), seq_lens=(700,), splits=Grid(4, 30, False)),
        gpu_only(name="isoquant4", head_dim=64, group=8, query_lens=(8, 2), seq_lens=(3000, 100),
                 splits=Grid(2, 9, True)),
        gpu_only(name="turboquant25", group=16, query_lens=(3,), seq_lens=(40,), size=1e4, dtype=torch.float32,
                 splits=Grid(4, 9, True)),
        gpu_only(name="turboquant35", seq_lens=(33, 16), block_size=32, dtype=torch.float32),
        gpu_only(name="turboquant25", seq_lens=(100, 37), splits=1, dtype=torch.bfloat16),
        gpu_only(name="isoquant4", head_dim=64, group=8, seq_lens=(70,), splits=Grid(1, 5, False)),
        gpu_only(name="turboquant35", head_dim=64, group=2, query_lens=(2, 0, 1), seq_lens=(5, 9, 100)),
        gpu_only(name="turboquant25", group=1, query_lens=(1, 7), seq_lens=(1, 70)),
        gpu_only(name="isoquant4", seq_lens=(40,), size=1e-5, dtype=torch.float32),
        gpu_only(name="tq4", group=16, query_lens=(4, 2), seq_lens=(3000, 40), size=1e-5, dtype=torch.float32,
                 splits=Grid(4, 9, True)),
        gpu_only(name="turboquant25", seq_lens=(40,), size=1e4, dtype=torch.float32),
        gpu_only(name="tq4", seq_lens=(9000, 4097), splits=8),
        gpu_only(name="turboquant25", seq_lens=(9000, 4097), splits=Grid(1, 100, False)),
        gpu_only(name="tq3", seq_lens=(70000, 9000, 33), splits=Grid(8, 32, True)),
    ],
    ids=str,
)  # fmt: skip
def test_pages(options: dict[str, Any]) -> None:
    bound = 6e-3 if options.get("dtype") == torch.bfloat16 else BOUND  # bf16 rounds the output itself to 2^-9
    assert relative_rms(*decode_tests.run(kernel=KERNEL, **options)) < bound


@runs
@pytest.mark.parametrize(
    "options",
    [
        {"name": "turboquant35", "seq_lens": (1, 40)},
        {"name": "tq4", "group": 16, "query_lens": (1, 2), "seq_lens": (1, 40), "splits": Grid(2, 3, True)},
        {"name": "turboquant35", "head_dim": 256, "group": 6, "seq_lens": (40, 550)},
        {
            "name": "tq3",
            "head_dim": 256,
            "group": 6,
            "query_lens": (1, 4),
            "seq_lens": (40, 550),
            "splits": Grid(4, 2, True),
        },
        gpu_only(name="tq4", seq_lens=(1, 40)),
        gpu_only(name="turboquant25", group=16, query_lens=(3, 4), seq_lens=(3, 50), splits=Grid(2, 3, True)),
        gpu_only(name="turboquant25", group=2, query_lens=(3, 1), seq_lens=(3, 50)),
        gpu_only(
            name="isoquant4", group=16, head_dim=128, query_lens=(3, 4), seq_lens=(300, 50), splits=Grid(4, 3, True)
        ),
        gpu_only(name="isoquant4", group=16, head_dim=128, query_lens=(2, 1), seq_lens=(700, 50)),
    ],
    ids=str,
)
def test_centred_and_scaled_pages(options: dict[str, Any]) -> None:
    options = {"head_dim": 64, **options}
    assert relative_rms(*decode_tests.run(kernel=KERNEL, **options, **transforms(options["head_dim"]))) < BOUND


@runs
@pytest.mark.parametrize(
    "options",
    [
        {"name": "isoquant3", "kv_heads": 1, "requests": ((90, 0), (20, 0), (50, 44)), "query_lens": (1, 0, 1)},
        {"name": "turboquant35", "head_dim": 64, "kv_heads": 1, "requests": ((90, 0), (60, 50), (20, 20)),
         "query_lens": (3, 2, 1), "recent": 16, "group": 2, "block_size": 4},
        # In equal parts, and in stream-K parts: the last part has the ring, and may have no pages.
        {"name": "isoquant4", "head_dim": 64, "kv_heads": 1, "group": 2, "query_lens": (3, 1, 2), "recent": 300,
         "requests": ((1100, 0), (1700, 900), (600, 560)), "splits": Grid(2, 6, True)},
        {"name": "tq3", "head_dim": 64, "kv_heads": 1, "group": 2, "requests": ((3000, 0), (2400, 2100), (300, 0)),
         "query_lens": (2, 3, 1), "recent": 200, "splits": Grid(8, 5, True)},
        # Teams: tiles of the ring are fewer than warps, or more; a part of a request may have neither.
        {"name": "isoquant4", "head_dim": 64, "kv_heads": 1, "group": 4, "query_lens": (3, 1, 2), "recent": 300,
         "requests": ((1100, 0), (1700, 900), (600, 560)), "splits": Grid(2, 6, True)},
        {"name": "turboquant25", "kv_heads": 1, "group": 16, "query_lens": (2, 1), "recent": 64,
         "requests": ((700, 0), (60, 50)), "splits": Grid(1, 12, False)},
        {"name": "isoquant4", "kv_heads": 1, "group": 16, "query_lens": (2, 1), "recent": 64,
         "requests": ((700, 0), (60, 50)), "splits": Grid(1, 12, False)},
        {"name": "isoquant4", "kv_heads": 1, "group": 16, "query_lens": (4, 1), "recent": 64,
         "requests": ((700, 0), (60, 50)), "splits": Grid(4, 3, True)},
        {"name": "isoquant4", "kv_heads": 1, "group": 16, "query_lens": (2,), "recent": 64, "requests": ((300, 0),),
         "size": (2e-3, 1.0), "splits": Grid(4, 2, True)},
        # Passes, whose windows begin at other tokens.
        {"name": "isoquant4", "head_dim": 64, "kv_heads": 1, "group": 16, "query_lens": (9, 1), "recent": 16,
         "requests": ((140, 0), (60, 50)), "splits": Grid(2, 3, False)},
        {"name": "turboquant35", "head_dim": 256, "kv_heads": 1, "group": 6, "recent": 64,
         "requests": ((700, 0), (60, 50), (20, 20)), "query_lens": (1, 1, 1), "splits": Grid(4, 2, True)},
        {"name": "tq4", "head_dim": 256, "kv_heads": 1, "group": 2, "recent": 64, "requests": ((300, 0), (60, 50)),
         "query_lens": (2, 1), "splits": Grid(1, 6, False)},
        # 24 columns of a warp, and a team of 48.
        {"name": "tq3", "head_dim": 64, "kv_heads": 1, "group": 6, "query_lens": (4, 1), "recent": 64,
         "requests": ((1100, 0), (60, 50)), "splits": Grid(4, 3, True)},
        {"name": "turboquant25", "head_dim": 64, "kv_heads": 1, "group": 6, "query_lens": (8, 1), "recent": 64,
         "requests": ((300, 0), (60, 50)), "splits": Grid(2, 3, True)},
        # Teams of 8 warps over heads of 256 have a tile of the ring for every second warp.
        {"name": "tq4", "head_dim": 256, "kv_heads": 1, "group": 6, "recent": 200, "query_lens": (5, 1, 2),
         "requests": ((700, 0), (60, 50), (20, 20)), "splits": Grid(8, 2, True)},
        # Smaller ones for each warp: rings of one tile, and of many.
        {"name": "tq4", "head_dim": 256, "kv_heads": 1, "group": 6, "recent": 200, "query_lens": (4, 1, 2),
         "requests": ((700, 0), (60, 50), (20, 20)), "splits": Grid(4, 2, True)},
        {"name": "turboquant35", "head_dim": 256, "kv_heads": 1, "group": 6, "recent": 64, "query_lens": (2, 1),
         "requests": ((300, 0), (60, 44)), "splits": Grid(2, 2, False)},
        gpu_only(name="tq3", head_dim=256, kv_heads=4, group=6, recent=64, query_lens=(4, 3),
                 requests=((3000, 0), (2400, 2100)), splits=Grid(4, 66, True)),
        gpu_only(name="tq3", group=8, query_lens=(16, 12), recent=64, requests=((700, 0), (900, 800)),
                 splits=Grid(4, 8, True)),
        gpu_only(name="isoquant4", group=16, query_lens=(4, 1, 3), splits=Grid(4, 8, True)),
        gpu_only(name="tq3", group=8, query_lens=(2, 1), recent=64, requests=((1000, 0), (2049, 1000)),
                 splits=Grid(1, 20, False)),
        gpu_only(name="turboquant35", group=8, query_lens=(4, 3, 1), recent=200,
                 requests=((3000, 0), (2400, 2100), (300, 0)), splits=Grid(4, 5, True)),
        gpu_only(name="isoquant4"),
        gpu_only(name="turboquant25", head_dim=64, requests=((50, 44), (50, 50), (100, 16)), block_size=4),
        gpu_only(name="isoquant4", recent=1, splits=Grid(1, 2, False), group=8),
        gpu_only(name="isoquant4", head_dim=64, recent=200, requests=((140, 0), (30, 0))),
        gpu_only(name="tq3", recent=64, requests=((1000, 0), (2049, 1000)), splits=Grid(1, 20, False)),
    ],
    ids=str,
)  # fmt: skip
def test_recent_tokens(options: dict[str, Any]) -> None:
    assert relative_rms(*ring_tests.run(kernel=KERNEL, **options)) < BOUND


@pytest.mark.parametrize(
    ("name", "centred", "columns"),
    half(("isoquant4", "isoquant3", "turboquant35", "turboquant25"), (False, True), COLUMN_COUNTS),
)
def test_resources(name: str, centred: bool, columns: int, tmp_path: Path) -> None:
    """NVRTC, which needs no GPU, compiles the kernel: an SM holds the warps of the grid. Up to 24 columns, few words
    are spilled, outside of the loop; 32 columns and teams spill some in it, and blocks with warps that only unpack
    none."""
    page = page_layout(FORMATS[name], 128)
    if columns == 48 and has_unpackers(page):
        pytest.skip("they have 64 columns instead")
    few, _ = block_kinds(GridInputs(8, 128, 132, has_unpackers(page)), columns)
    variant = PairVariant(
        few.warps, True, columns, 16, ring_block=8, recent=64, has_bias=centred, output=torch.bfloat16,
        tiles_a_block=8 * centred,
    )  # fmt: skip
    values = constants(page, 8, 4, variant)
    file = tmp_path / "decode.cubin"
    file.write_bytes(machine_code(Compilation.of(source_of(values), values)))
    registers, stack, _ = resources(file)["decode"]
    threads, shared_bytes = block_of(file.read_bytes(), "decode")
    blocks = few.warps_per_sm // few.warps
    spilled = {4: 16, 8: 16, 16: 16, 24: 32, 32: 48}.get(columns, 0 if int(values["UNPACKERS"]) else 192)
    assert registers <= 255 and stack <= spilled
    assert generation_of((9, 0)).resident_blocks(registers, shared_bytes, threads // 32) >= blocks


@pytest.mark.parametrize(
    ("name", "columns", "is_final"),
    [
        *half(("isoquant4", "turboquant25"), (4, 8), (True, False)),
        *((*case, True) for case in half(("isoquant4", "turboquant25"), (16, 24, 32, 48, 64))),
    ],
)
def test_resources_of_heads_of_256(name: str, is_final: bool, columns: int, tmp_path: Path) -> None:
    """An SM holds three blocks of four warps, or as many warps in blocks of one; of teams 8 warps, of 32 columns
    16."""
    page = page_layout(FORMATS[name], 256)
    few, many = block_kinds(GridInputs(4, 256, 132), columns)
    assert few.warps == many.warps and few.warps_per_sm == {4: 12, 8: 12, 32: 16}.get(columns, 8)
    warps = few.warps if is_final else 1
    variant = PairVariant(
        warps, is_final, columns, 16, ring_block=8, recent=64, has_bias=True, output=torch.bfloat16, tiles_a_block=8
    )
    values, file = constants(page, 4, 6, variant), tmp_path / "decode.cubin"
    file.write_bytes(machine_code(Compilation.of(source_of(values), values)))
    registers, stack, _ = resources(file)["decode"]
    threads, shared_bytes = block_of(file.read_bytes(), "decode")
    assert registers <= LARGE_REGISTERS[columns] and stack <= {16: 0, 32: 192, 48: 64, 64: 96}.get(columns, 24)
    assert shared_bytes <= generation_of((9, 0)).block_shared_bytes
    assert generation_of((9, 0)).resident_blocks(registers, shared_bytes, threads // 32) >= few.warps_per_sm // warps


@pytest.mark.parametrize(
    ("name", "columns", "capability"),
    [
        ("tq4", 4, (10, 0)), ("tq4", 32, (10, 0)), ("tq3", 16, (10, 0)), ("turboquant25", 32, (10, 0)),
        ("tq4", 8, (12, 0)), ("tq4", 32, (12, 0)), ("turboquant25", 16, (12, 0)), ("tq3", 32, (12, 0)),
        ("turboquant25", 8, (10, 3)), ("turboquant35", 8, (12, 1)), ("tq4", 24, (12, 0)), ("turboquant25", 24, (10, 0)),
    ],
)  # fmt: skip
def test_resources_of_blackwell(name: str, columns: int, capability: tuple[int, int], tmp_path: Path) -> None:
    """NVRTC compiles what "cuda" takes there: blocks fit, an SM holds those of the grid, and copies need no call."""
    page, generation = page_layout(FORMATS[name], 128), generation_of(capability)
    few, _ = block_kinds(GridInputs(8, 128, 132, has_unpackers(page), generation), columns)
    variant = PairVariant(
        few.warps, True, columns, 16, ring_block=8, recent=64, has_bias=True, output=torch.bfloat16, tiles_a_block=8,
        capability=capability,
    )  # fmt: skip
    values, file = constants(page, 8, 4, variant), tmp_path / "decode.cubin"
    file.write_bytes(machine_code(Compilation.of(source_of(values, capability), values)))
    registers, stack, _ = resources(file)["decode"]
    threads, shared_bytes = block_of(file.read_bytes(), "decode")
    assert registers <= 255 and stack <= (16 if columns <= 16 else 56)
    assert shared_bytes <= generation.block_shared_bytes
    assert generation.resident_blocks(registers, shared_bytes, threads // 32) >= few.warps_per_sm // few.warps
    assert "CALL.ABS" not in dump("--dump-sass", file)


@pytest.mark.parametrize(("capability", "warps"), [((10, 0), [16, 16, 8, 8, 8]), ((12, 0), [8, 8, 8, 4, 4])])
def test_grids_of_blackwell(capability: tuple[int, int], warps: list[int]) -> None:
    """Its SMs hold the warps that fit their shared memory, whole blocks of either kind."""
    inputs = GridInputs(8, 128, 132, generation=generation_of(capability))
    assert [inputs.warps_per_sm(columns) for columns in COLUMN_COUNTS[:5]] == warps
    for columns, most in zip(COLUMN_COUNTS, warps, strict=False):
        few, many = block_kinds(inputs, columns)
        assert 4 <= many.warps <= few.warps <= most and most % few.warps == most % many.warps == 0
        assert grid(1, inputs._replace(kv_heads=1), columns) == Grid(1, 128, False)


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("requests", [1, 3, 4, 24, 32, 66, 67, 128, 256, 529])
def test_grid(requests: int, kv_heads: int) -> None:
    """Blocks write the output if there are enough pairs for 132 x 16 warps; otherwise there are splits of one warp."""
    inputs = GridInputs(kv_heads, 128, 132)
    shape = grid(requests, inputs, 4)
    assert shape == grid(requests, inputs, 8)
    assert shape.is_final == (shape.warps > 1) == (requests * kv_heads > 29)
    if shape.is_final:
        assert shape.warps == (8 if requests * kv_heads <= 2 * 264 else 4)
        assert shape.blocks == requests + math.ceil(1.5 * (132 * 16 // shape.warps // kv_heads))
    else:
        assert shape.blocks == min(128, 132 * 16 // (requests * kv_heads))


@pytest.mark.parametrize(("requests", "shape"), [(1, Grid(1, 128, False)), (8, Grid(1, 49, False)),
                         (32, Grid(4, 32 + 149, True)), (128, Grid(4, 128 + 149, True))])  # fmt: skip
def test_grid_of_heads_of_256(requests: int, shape: Grid) -> None:
    """132 SMs hold 396 blocks of 4 warps, or 1,584 of one."""
    assert grid(requests, GridInputs(4, 256, 132), 8) == shape


@pytest.mark.parametrize(("requests", "warps_of_16", "warps_of_32"), [(3, 1, 1), (4, 4, 4), (66, 4, 4), (67, 2, 4)])
def test_grid_of_16_and_32_columns(requests: int, warps_of_16: int, warps_of_32: int) -> None:
    """An SM holds half the warps that it holds of 8 columns, in as many blocks."""
    for columns, warps in ((16, warps_of_16), (32, warps_of_32)):
        shape = grid(requests, GridInputs(8, 128, 132), columns)
        assert (shape.warps, shape.is_final) == (warps, warps > 1), columns


@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_schedulers_have_room(group: int, head_dim: int) -> None:
    """For every length of a step, also where columns share blocks but not passes."""
    inputs, most = GridInputs(8, head_dim, 132), 48
    lengths = range(1, 4 * pass_tokens(group) + 1)
    made = make_schedulers(most, inputs, columns_of_steps(group, lengths[-1], unpackers=False), torch.device(DEVICE))
    for length in lengths:
        columns, passes = column_count(group, length, unpackers=False), pass_count(group, length)
        for requests in range(1, most + 1):
            assert made[block_kind(requests * passes, inputs, columns)].requests >= requests * passes, (
                length,
                requests,
            )


@pytest.mark.parametrize("requests", [1, 4, 32, 128])
def test_grid_of_teams(requests: int) -> None:
    """A block has a warp for each group of 32 channels, whether it writes the output or not."""
    inputs = GridInputs(8, 64, 132)
    shape, resident = grid(requests, inputs, COLUMNS), 132 * inputs.warps_per_sm(COLUMNS) // 2
    assert shape.warps == 2
    assert shape.is_final == (resident // (requests * 8) <= 8)
    blocks = requests + math.ceil(1.5 * (resident // 8)) if shape.is_final else min(128, resident // (requests * 8))
    assert shape.blocks == blocks


def test_columns() -> None:
    lengths = (1, 4, 5, 8, 9, 17, 25, 33, 49, 64)
    found = [[column_count(1, length, unpackers=unpackers) for length in lengths] for unpackers in (False, True)]
    assert found == [[4, 4, 8, 8, 16, 24, 32, 48, 64, 64], [4, 4, 8, 8, 16, 24, 32, 64, 64, 64]]
    assert [pass_count(6, length) for length in (1, 10, 11, 16)] == [1, 1, 2, 2]
    of_steps = functools.partial(columns_of_steps, unpackers=False)
    assert of_steps(16, 4) == {16: 1, 32: 1, 48: 1, 64: 1}
    assert of_steps(6, 16) == {8: 1, 16: 1, 24: 1, 32: 1, 48: 1, 64: 2}
    assert of_steps(24, 3) == {24: 1, 48: 2}
    assert columns_of_steps(16, 4, unpackers=True) == {16: 1, 32: 1, 64: 1}
