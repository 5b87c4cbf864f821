"""The CUDA kernel against the reference of the Triton one; on a Hopper GPU, else emulated on the CPU by g++."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import test_decode as decode_tests
import test_ring as ring_tests
import torch
from packed_kv.kernels.cuda import CAPABILITY, refusal
from packed_kv.kernels.cuda.launch import Grid, grid
from test_decode import BOUND, DEVICE, relative_rms, transforms

if DEVICE == "cpu":
    KERNEL = "cuda emulated"
    pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
else:
    KERNEL = "cuda"
    unfit = torch.cuda.get_device_capability() != CAPABILITY
    pytestmark = pytest.mark.skipif(unfit, reason="needs a GPU of compute capability 9.0")

PAGES: list[dict[str, Any]] = [
    {"name": "isoquant4", "seq_lens": (1, 37, 300)},
    {"name": "isoquant3", "kv_heads": 1, "seq_lens": (64, 50)},
    {"name": "turboquant35", "kv_heads": 1, "seq_lens": (33, 16), "block_size": 32, "dtype": torch.float32},
    {"name": "turboquant25", "seq_lens": (100, 37), "splits": 1, "dtype": torch.bfloat16},
    {"name": "isoquant4", "head_dim": 64, "kv_heads": 1, "group": 8, "seq_lens": (70,), "splits": Grid(1, 5)},
    {"name": "isoquant3", "head_dim": 64, "kv_heads": 1, "group": 7, "seq_lens": (70,), "block_size": 48},
    {
        "name": "turboquant35",
        "head_dim": 64,
        "kv_heads": 1,
        "group": 2,
        "query_lens": (2, 0, 1),
        "seq_lens": (5, 9, 100),
    },
    {
        "name": "turboquant25",
        "head_dim": 64,
        "kv_heads": 1,
        "group": 2,
        "query_lens": (4, 0, 3),
        "seq_lens": (9, 5, 70),
    },
    {"name": "turboquant25", "kv_heads": 1, "group": 1, "query_lens": (1, 7), "seq_lens": (1, 70)},
    {"name": "isoquant4", "kv_heads": 1, "seq_lens": (40,), "size": 1e-5, "dtype": torch.float32},
    {"name": "turboquant25", "kv_heads": 1, "seq_lens": (40,), "size": 1e4, "dtype": torch.float32},
]


@pytest.mark.parametrize("options", PAGES, ids=str)
def test_pages(options: dict[str, Any]) -> None:
    bound = 6e-3 if options.get("dtype") == torch.bfloat16 else BOUND  # bf16 rounds the output itself to 2^-9
    assert relative_rms(*decode_tests.run(kernel=KERNEL, **options)) < bound


@pytest.mark.parametrize(
    "options",
    [
        {"name": "tq4", "seq_lens": (1, 40)},
        {"name": "turboquant25", "group": 2, "query_lens": (3, 1), "seq_lens": (3, 50)},
    ],
    ids=str,
)
def test_centred_and_scaled_pages(options: dict[str, Any]) -> None:
    assert relative_rms(*decode_tests.run(kernel=KERNEL, head_dim=64, **options, **transforms(64))) < BOUND


RINGS: list[dict[str, Any]] = [
    {"name": "isoquant4", "kv_heads": 1},
    {
        "name": "turboquant25",
        "head_dim": 64,
        "kv_heads": 1,
        "requests": ((50, 44), (50, 50), (100, 16)),
        "block_size": 4,
    },
    {
        "name": "turboquant35",
        "kv_heads": 1,
        "requests": ((90, 0), (60, 50)),
        "query_lens": (3, 2),
        "recent": 16,
        "group": 2,
    },
    {"name": "isoquant3", "kv_heads": 1, "requests": ((90, 0), (20, 0)), "query_lens": (1, 0)},
    {"name": "isoquant4", "kv_heads": 1, "recent": 1, "splits": Grid(1, 2), "group": 8},
    {"name": "isoquant4", "head_dim": 64, "kv_heads": 1, "recent": 200, "requests": ((140, 0), (30, 0))},
]


@pytest.mark.parametrize("options", RINGS, ids=str)
def test_recent_tokens(options: dict[str, Any]) -> None:
    assert relative_rms(*ring_tests.run(kernel=KERNEL, **options)) < BOUND


def test_refusal_names_what_the_kernel_does_not_take() -> None:
    """On Hopper; that of another card, and of a missing package, come first or last."""
    assert "8.9" in str(refusal((8, 9), 128, 4, 1))
    for arguments, word in (((96, 4, 1), "96"), ((128, 4, 3), "12"), ((128, 16, 1), "16")):
        assert word in str(refusal((9, 0), *arguments)) or "times" in str(refusal((9, 0), *arguments))
    assert "window" in str(refusal((9, 0), 128, 4, 1, sliding_window=64))
    assert "cap" in str(refusal((9, 0), 64, 4, 2, logits_soft_cap=30.0))


@pytest.mark.parametrize("pairs", [1, 8, 32, 64, 200, 256, 300, 512, 1024, 4096])
def test_grid_fills_the_card(pairs: int) -> None:
    shape, places = grid(pairs, 132), 132 * 16
    warps = pairs * shape.blocks * shape.warps
    assert shape.blocks == 128 if pairs < 17 else warps / (-(-warps // places) * places) > 0.8
