"""Both decode kernels where keys are centred by blocks: the bias of a key's block against scores in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import test_cuda_decode
import torch
from implementations import attend_pages
from launchers import rotate_query
from packed_kv.codecs import ring as reference
from packed_kv.codecs.pages import PagedCodec
from packed_kv.codecs.ring import Ring
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda.grids import Grid
from packed_kv.kernels.triton.ring import plan_ring
from packed_kv.kernels.triton.rotate import rotation_matrix
from packed_kv.layout import page_layout
from test_cuda_decode import gpu_only, runs
from test_decode import BOUND, DEVICE, relative_rms
from test_ring import ring_of

LOG2_E = math.log2(math.e)


def run(
    kernel: str,
    name: str,
    *,
    requests: tuple[tuple[int, int], ...],
    query_lens: tuple[int, ...] | None = None,
    tiles_a_block: int = 1,
    blocks: int = 4,
    head_dim: int = 64,
    kv_heads: int = 1,
    group: int = 4,
    recent: int = 0,
    ring_block: int = 8,
    block_size: int = 16,
    splits: int | Grid = 3,
    size: float = 4,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return output and lse of a kernel, and those of float64: [tokens, query heads, head_dim], [tokens, query heads].

    The bias is of random numbers, of a standard deviation of `size` in log2 units, so each block's is another.

    Args:
        kernel: of `attend_pages`.
        name: of the dtype.
        requests: of each its tokens, and of them those from the prefix cache, which are not in the ring.
        query_lens: query tokens of each request; None: one each.
        tiles_a_block: tiles of 32 tokens of a block of means; 0: one block has all of them.
        blocks: of means; tokens behind the last one take it.
        recent: tokens of the recent window; 0: none.
    """
    generator = torch.Generator().manual_seed(head_dim + sum(tokens for tokens, _ in requests))
    query_lens = query_lens or (1,) * len(requests)
    codec = PagedCodec(FORMATS[name], head_dim, device=DEVICE)
    seq_lens = torch.tensor([tokens for tokens, _ in requests], dtype=torch.int32, device=DEVICE)
    start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(DEVICE)
    ring, rings = None, (torch.empty(0), torch.empty(0))
    first = seq_lens.clone()
    if recent:
        longest = max(query_lens)
        *rings, ring_blocks = ring_of(list(requests), recent, ring_block, kv_heads, head_dim, longest - 1)
        slots = torch.full((sum(query_lens),), 77, dtype=torch.int32, device=DEVICE)
        sizes = dict(block_size=ring_block, ring_blocks=ring_blocks, window=recent, longest_decode=longest)
        plan_ring(start, seq_lens, rings[0], slots, first, **sizes)
        ring = Ring(rings[1], rings[0], first, recent)
    pages_each = [-(-tokens // block_size) for tokens, _ in requests]
    shape = (sum(pages_each) + 2, kv_heads, block_size, codec.slot_bytes)
    pages = torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)
    order = torch.randperm(len(pages), generator=generator).to(torch.int32)
    page_table = torch.full((len(requests), max(pages_each)), -1, dtype=torch.int32)
    query = torch.randn(sum(query_lens), kv_heads * group, head_dim, generator=generator).to(DEVICE, torch.float16)
    bias = size * torch.randn(len(query), kv_heads * group, 1 + blocks, generator=generator).to(DEVICE)
    expected = torch.zeros(query.shape, dtype=torch.float64, device=DEVICE)
    expected_lse = torch.zeros(query.shape[:2], dtype=torch.float64, device=DEVICE)
    scale, used = head_dim**-0.5, 0
    for i, (tokens, hit) in enumerate(requests):
        page_table[i, : pages_each[i]] = order[used : used + pages_each[i]]
        used += pages_each[i]
        key, value = torch.randn(2, tokens, kv_heads, head_dim, generator=generator).to(DEVICE)
        ids = torch.arange(tokens)
        slots = page_table[i, ids // block_size].long() * block_size + ids % block_size
        codec.write(pages, slots.to(DEVICE), key, value)
        parts = ((codec.key, key), (codec.value, value))
        from_pages = [part.decode(part.encode(x)).double() for part, x in parts]
        from_ring = from_pages
        if recent:
            rotated = [part.prepare(x) for part, x in parts]
            for token in range(hit, tokens):  # one by one: later tokens overwrite earlier ones
                block = int(rings[0][i, token // ring_block])
                slot = torch.tensor([block * ring_block + token % ring_block if block else -1], device=DEVICE)
                reference.write(rings[1], slot, *(x[token : token + 1] for x in rotated))
            from_ring = [part.unrotate(reference.round_trip(x)).double()
                         for (part, _), x in zip(parts, rotated, strict=True)]  # fmt: skip
        of_token = 1 + (ids // (32 * tiles_a_block) if tiles_a_block else 0 * ids).clamp(max=blocks - 1)
        for row in range(int(start[i]), int(start[i + 1])):
            position = tokens - int(start[i + 1]) + row
            is_recent = ((ids >= int(first[i])) & (ids > position - recent)).to(DEVICE)[:, None, None]
            k, v = (torch.where(is_recent, a, b)[: position + 1].repeat_interleave(group, 1)
                    for a, b in zip(from_ring, from_pages, strict=True))  # fmt: skip
            added = bias[row][:, of_token[: position + 1].to(DEVICE)].double()
            added[:, 0] += bias[row, :, 0]
            scores = torch.einsum("hd,khd->hk", query[row].double(), k) * scale + added / LOG2_E
            expected[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
            expected_lse[row] = scores.logsumexp(-1)
    rotated_query = torch.empty(len(query), kv_heads, group, head_dim, dtype=torch.float16, device=DEVICE)
    rotate_query(query, rotation_matrix(codec.key, kv_heads), rotated_query, scale)
    output = torch.full(query.shape, float("nan"), dtype=torch.float32, device=DEVICE)
    lse = torch.full(query.shape[:2], float("nan"), device=DEVICE)
    attend_pages(
        kernel, page_layout(FORMATS[name], head_dim), rotated_query, pages, page_table.to(DEVICE), start, seq_lens,
        rotation_matrix(codec.value, kv_heads, inverse=True), output, splits, max_query_len=max(query_lens),
        query_bias=bias, tiles_a_block=tiles_a_block, ring=ring, lse=lse,
    )  # fmt: skip
    return (output.double(), lse.double()), (expected, expected_lse)


KERNELS = ["triton", pytest.param(test_cuda_decode.KERNEL, marks=runs)]
CASES = [
    # Token 0 alone, a block's edge, and tokens behind the last block, which take its bias.
    {"name": "isoquant4", "requests": ((1, 0), (32, 0), (33, 0), (170, 0))},
    # One block: no tile looks for another.
    {"name": "isoquant4", "requests": ((40, 0), (1, 0)), "tiles_a_block": 0, "blocks": 1},
    # Biases far apart: the running maximum is one of whole scores, and blocks come and go.
    {"name": "isoquant4", "requests": ((300, 0),), "size": 40, "blocks": 10, "splits": 1},
    # Drafts, in 8 columns; a window whose ring tiles lie in two blocks.
    {"name": "turboquant25", "requests": ((140, 0), (40, 0), (70, 0)), "query_lens": (3, 2, 0), "group": 2,
     "recent": 48, "ring_block": 4, "tiles_a_block": 2, "blocks": 2, "block_size": 32},
    # All tokens are in the ring, token 0 too.
    {"name": "tq3", "requests": ((90, 0), (60, 44)), "recent": 200, "group": 7},
    # 16 columns, one of them of no query.
    {"name": "tq3", "requests": ((140, 0), (70, 60)), "query_lens": (5, 2), "group": 3, "recent": 48, "blocks": 3},
    gpu_only(name="turboquant35", requests=((700, 0), (300, 260)), head_dim=128, kv_heads=2, group=16, recent=64),
    # 32 and 64 columns.
    {"name": "isoquant4", "requests": ((170, 0), (1, 0), (40, 30)), "query_lens": (3, 1, 2), "group": 8, "recent": 16,
     "ring_block": 4, "size": 40},
    {"name": "turboquant25", "requests": ((90, 0),), "query_lens": (4,), "group": 16, "size": 40, "blocks": 3},
    gpu_only(name="tq4", requests=((3000, 0), (33, 0)), head_dim=128, group=16, query_lens=(4, 3), tiles_a_block=8,
             blocks=12, recent=64),
    gpu_only(name="tq3", requests=((1000, 0), (90, 60)), head_dim=128, group=16, query_lens=(10, 3), recent=64),
    gpu_only(name="turboquant35", requests=((700, 0), (300, 260)), head_dim=128, kv_heads=2, group=12,
             query_lens=(2, 1), recent=64, size=40),
    gpu_only(name="tq4", requests=((3000, 0), (33, 0)), head_dim=128, group=4, query_lens=(4, 3), tiles_a_block=8,
             blocks=12, recent=64),
    gpu_only(name="isoquant4", requests=((1000, 0), (257, 0)), tiles_a_block=8, blocks=4, group=3, recent=64),
    gpu_only(name="turboquant35", requests=((700, 0), (300, 260)), head_dim=128, kv_heads=2, group=8, recent=16),
    gpu_only(name="tq4", requests=((5000, 0), (400, 0)), tiles_a_block=8, blocks=32, head_dim=128, size=20),
    gpu_only(name="tq3", requests=((3000, 0),), query_lens=(8,), group=1, tiles_a_block=4, blocks=24, recent=64),
]  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_bias_of_blocks(kernel: str, options: dict[str, Any]) -> None:
    (output, lse), (expected, expected_lse) = run(kernel, **options)
    assert relative_rms(output, expected) < BOUND
    assert (lse - expected_lse).abs().max() < 0.01


@runs
@pytest.mark.parametrize(
    "options",
    [
        # Requests are cut at multiples of 8 tiles; blocks of means have 5, so a part begins inside of one.
        {"name": "isoquant4", "requests": ((1100, 0), (1700, 0), (40, 0)), "tiles_a_block": 5, "blocks": 11,
         "splits": Grid(2, 3, True)},
        # The last part has the ring. 8 columns.
        {"name": "turboquant35", "requests": ((1100, 0), (600, 560)), "query_lens": (2, 1), "recent": 100,
         "tiles_a_block": 3, "blocks": 12, "splits": Grid(2, 4, True)},
        # Blocks of one warp, which write partial results.
        {"name": "isoquant3", "requests": ((330, 0), (70, 0)), "query_lens": (1, 3), "group": 2, "recent": 32,
         "splits": Grid(1, 5, False)},
        # Teams of two warps: a tile has four blocks of means.
        {"name": "isoquant4", "requests": ((1100, 0), (600, 560)), "group": 16, "recent": 100, "tiles_a_block": 1,
         "blocks": 30, "size": 20, "splits": Grid(2, 4, True)},
        # Two warpgroups: a tile has two blocks of means.
        {"name": "isoquant4", "head_dim": 128, "requests": ((600, 0), (300, 260)), "group": 16, "query_lens": (2, 1),
         "recent": 40, "tiles_a_block": 1, "blocks": 20, "size": 20, "splits": Grid(4, 2, True)},
        # Heads of 256: parts that begin inside of a block of means, and blocks of one warp.
        {"name": "turboquant35", "head_dim": 256, "requests": ((1100, 0), (600, 560)), "group": 6, "recent": 100,
         "tiles_a_block": 3, "blocks": 12, "splits": Grid(4, 2, True)},
        {"name": "tq4", "head_dim": 256, "requests": ((330, 0), (70, 0)), "query_lens": (1, 2), "group": 2,
         "recent": 32, "splits": Grid(1, 5, False)},
        gpu_only(name="tq4", requests=((9000, 0), (5000, 0), (33, 0)), head_dim=256, kv_heads=4, group=6,
                 tiles_a_block=8, blocks=40, recent=64, splits=Grid(4, 99, True)),
        gpu_only(name="turboquant25", requests=((9000, 0), (5000, 0)), query_lens=(4, 1), group=12, head_dim=128,
                 kv_heads=8, tiles_a_block=4, blocks=80, recent=64, splits=Grid(4, 33, True)),
        gpu_only(name="tq4", requests=((9000, 0), (5000, 0), (33, 0)), head_dim=128, kv_heads=8, tiles_a_block=8,
                 blocks=40, recent=64, splits=Grid(8, 33, True)),
        gpu_only(name="turboquant25", requests=((9000, 0), (5000, 0)), query_lens=(2, 1), head_dim=128, kv_heads=8,
                 tiles_a_block=4, blocks=80, recent=64, splits=Grid(4, 66, True)),
    ],
    ids=str,
)  # fmt: skip
def test_bias_of_blocks_in_the_grids_of_cuda(options: dict[str, Any]) -> None:
    (output, lse), (expected, expected_lse) = run(test_cuda_decode.KERNEL, **options)
    assert relative_rms(output, expected) < BOUND
    assert (lse - expected_lse).abs().max() < 0.01


@pytest.mark.skipif(DEVICE == "cpu", reason="the emulator and the interpreter are held to float64 above")
@runs
def test_kernels_agree() -> None:
    """The two kernels on the same input, without float64 between them."""
    options: dict[str, Any] = dict(
        name="tq4", requests=((4000, 0), (700, 300), (1, 0)), query_lens=(2, 1, 1), head_dim=128, kv_heads=4,
        tiles_a_block=8, blocks=16, recent=64,
    )  # fmt: skip
    (of_triton, lse_of_triton), _ = run("triton", **options)
    (of_cuda, lse_of_cuda), _ = run("cuda", **options)
    assert relative_rms(of_cuda, of_triton) < BOUND
    assert (lse_of_cuda - lse_of_triton).abs().max() < 0.01
