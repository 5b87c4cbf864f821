"""On a GPU, launches of every variant of the CUDA kernels 200 times from a graph: each leaves the same bits.

The Triton kernels' launches are repeated in all of their tests (conftest.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from checkout import REPO
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import HEAD_DIMS, grids, latent_launch, runs_on
from repeated import rounds_that_differ
from test_copies import LAYOUTS

sys.path.insert(0, str(REPO / "benchmarks"))
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not runs_on(torch.cuda.get_device_capability()),
    reason="needs a GPU of compute capability 9.0",
)
SHAPES = ((40, 1536), (3, 8960))
"""Requests and tokens of a batch: more blocks than the card holds, and few requests in many parts."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rope_bits", [16, 8])
@pytest.mark.parametrize("rows", latent_launch.BLOCK_ROWS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_latents(name: str, rows: int, rope_bits: int, shape: tuple[int, int]) -> None:
    """Attention over pages alone, merged by itself, and with the ring, which merges."""
    from latent_kernels import RANK, ROPE
    from latent_layer import Case
    from packed_kv.codecs.latent import LatentCodec

    torch.manual_seed(rows)
    codec = LatentCodec(FORMATS[name], RANK, ROPE, device="cuda", rope_bits=rope_bits)
    heads = 2 * rows if rows > 32 and rope_bits == 8 else rows  # 128 and 96: two blocks of rows
    case = Case(codec, heads, *shape, window=64)
    for launches, has_window in ((("pages",), False), (("pages", "ring"), True)):
        run = case.round_of(launches, has_window=has_window)
        assert not rounds_that_differ(run, [case.output], one_by_one=partial(run, True)), launches


@pytest.mark.parametrize("rope_bits", [16, 8])
@pytest.mark.parametrize("rows", latent_launch.BLOCK_ROWS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_picked_latents(name: str, rows: int, rope_bits: int) -> None:
    """Attention over picked latent rows, in one part of a query token and in several."""
    from packed_kv.codecs.latent_rows import LatentRowCodec
    from sparse_latents import RANK, ROPE, Batch, row_blocks, rows_round

    torch.manual_seed(rows)
    codec = LatentRowCodec(FORMATS[name], RANK, ROPE, "cuda", rope_bits=rope_bits)
    for tokens, picks in ((200, 300), (3, 2048)):
        batch = Batch(tokens, picks, heads := 2 * rows if rows > 32 and rope_bits == 8 else rows)
        output = torch.empty(tokens, heads, RANK, dtype=torch.bfloat16, device="cuda")
        run = rows_round(batch, codec, batch.caches(row_blocks(codec)), output)
        assert not rounds_that_differ(run, [output]), (tokens, picks)


def batches() -> Iterator[Any]:
    """Every layout, head size and number of columns, with the ring and without; kinds of means in turn."""
    groups = {4: (4, 1), 8: (4, 2), 16: (16, 1), 24: (6, 4), 32: (8, 4), 48: (6, 8), 64: (16, 4)}
    assert set(groups) == set(grids.COLUMN_COUNTS)
    number = 0
    for name in LAYOUTS:
        for head_dim in HEAD_DIMS:
            for columns, (group, query_tokens) in groups.items():
                for recent in (0, 64):
                    number += 1
                    means = (None, "one", "blocks", "values")[(number - 1) // 2 % 4]
                    label = f"{name}-{head_dim}-{columns}-{recent}-{means}"
                    yield pytest.param(name, head_dim, group, query_tokens, recent, means, id=label)


@pytest.mark.parametrize(("name", "head_dim", "group", "query_tokens", "recent", "means"), list(batches()))
def test_pairs(
    name: str, head_dim: int, group: int, query_tokens: int, recent: int, means: str | None
) -> None:  # fmt: skip
    """Batches of each kind of grid: blocks that write the output, of few and many requests, and splits for `merge`."""
    import pair_kernels

    torch.manual_seed(head_dim)
    spread = 0 if recent else 0.5  # rings are of equal lengths
    for requests, context in ((40, 1280), (150, 640), (1, 5120)):
        settings = recent, spread, means, pair_kernels.Heads(8, head_dim, group), query_tokens
        layers = pair_kernels.Layers(name, requests, context, *settings)
        run = layers.rounds("cuda")["cuda"]
        assert not rounds_that_differ(run, layers.outputs), (requests, context)


@pytest.mark.parametrize("name", LAYOUTS)
def test_several_passes(name: str) -> None:
    """Query tokens of more columns than a pass serves."""
    import pair_kernels

    layers = pair_kernels.Layers(name, 20, 1280, 64, 0, None, pair_kernels.Heads(group=8), 20)
    run = layers.rounds("cuda")["cuda"]
    assert not rounds_that_differ(run, layers.outputs)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_passes_over_prefixes(name: str, head_dim: int) -> None:
    """Tables of fewer passes than the card holds blocks, and of more; of the launches of several layers the last is
    compared."""
    from prefixes import THIRDS, Case

    torch.manual_seed(head_dim)
    for requests, prefix, passes in ((1, 8192, 1), (3, 2048, 6), (40, 1024, 4)):
        case = Case(name, head_dim, requests, prefix, passes, group=6 if head_dim == 256 else 4)
        run = case.in_passes(THIRDS)["passes"]
        assert not rounds_that_differ(run, [case.output, case.lse]), (requests, passes)
