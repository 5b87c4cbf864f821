"""Passes over prefixes by the CUDA kernel, on a Hopper GPU, else emulated on the CPU by g++."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from launchers import rotate_query
from machine_code import resources
from packed_kv.codecs import ring as reference
from packed_kv.codecs.ring import Ring
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import COLUMNS, pass_tokens
from packed_kv.kernels.cuda.grids import GridInputs, block_kinds, grid_inputs, has_unpackers
from packed_kv.kernels.cuda.kernel import Compilation, block_of, machine_code
from packed_kv.kernels.cuda.launch import PairVariant, constants, pack_matrix, source_of
from packed_kv.kernels.cuda.prefix_launch import CudaPrefix, PrefixSchedules, prefix_arguments, prefix_grid
from packed_kv.kernels.triton.means import Means
from packed_kv.kernels.triton.rotate import rotation_matrix
from packed_kv.layout import page_layout
from page_codecs import page_codec
from repeated import rounds_that_differ
from test_cuda_decode import gpu_only, runs
from test_decode import BOUND, DEVICE, relative_rms, sized, transforms
from test_ring import poisoned_ring
from variants import EVERY

Pass = tuple[int, int, int, int]


def passes_of(chunks: list[int], prefixes: list[int], tokens: int) -> list[Pass]:
    """Return the words of every pass over the prefixes, of up to `tokens` rows each: empty ones, too."""
    starts = torch.tensor([0, *chunks]).cumsum(0).tolist()
    return [
        (request, starts[request] + row, min(tokens, count - row), prefix)
        for request, (count, prefix) in enumerate(zip(chunks, prefixes, strict=True))
        for row in range(0, count, tokens)
    ]


def run(
    name: str, chunks: tuple[int, ...], prefixes: tuple[int, ...], *, head_dim: int = 128, kv_heads: int = 1,
    group: int = 16, block_size: int = 16, resident: int = 6, recent: int = 0, hits: tuple[int, ...] | None = None,
    early: int = 0, unused: int = 3, size: Any = 1.0, dtype: torch.dtype = torch.float16, **channels: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return output and lse of the chunks' rows over their prefixes, both in float64, and the RMS of the scores.

    A chunk's own tokens lie behind its prefix, and are large: whoever reads one is noticed. Of a ring of `recent`
    tokens, requests have those from `hits` on; it begins `early` tokens before, of another V.
    `unused`: passes of the table without rows.
    """
    generator = torch.Generator().manual_seed(head_dim + len(chunks))
    codec = page_codec(FORMATS[name], head_dim, device=DEVICE, **channels)
    lens, heads = [sum(both) for both in zip(chunks, prefixes, strict=True)], kv_heads * group
    each = [-(-n // block_size) for n in lens]
    cache = torch.full((sum(each) + 1, kv_heads, block_size, codec.slot_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    order, table = torch.randperm(sum(each), generator=generator), torch.full((len(lens), max(each)), 10**8)
    query = torch.randn(sum(chunks), heads, head_dim, generator=generator).to(DEVICE, dtype)
    expected = torch.zeros(query.shape, dtype=torch.float64, device=DEVICE)
    expected_lse = torch.full(query.shape[:2], float("-inf"), dtype=torch.float64, device=DEVICE)
    ring, scale, row, squares = None, head_dim**-0.5, 0, []
    if recent:
        entries = -(-max(prefixes) // 32) + 1
        ring_table = torch.arange(1, 1 + len(lens) * entries, dtype=torch.int32).view(len(lens), -1)
        first = [
            max(hit, prefix - recent + 1, 0) for hit, prefix in zip(hits or (0,) * len(lens), prefixes, strict=True)
        ]
        held = poisoned_ring(1 + len(lens) * entries, kv_heads, 32, head_dim)
        begins = torch.tensor(first, dtype=torch.int32, device=DEVICE)
        ring = Ring(held, ring_table.to(DEVICE), begins - early, recent)
    for i, (count, prefix) in enumerate(zip(chunks, prefixes, strict=True)):
        table[i, : each[i]] = order[sum(each[:i]) : sum(each[: i + 1])]
        key, value = torch.randn(2, lens[i], kv_heads, head_dim, generator=generator).to(DEVICE)
        value = sized(value, size)
        key[prefix:] *= 30
        value[prefix:] = 1e4
        ids = torch.arange(lens[i], device=DEVICE)
        slots = table[i].to(DEVICE)[ids // block_size] * block_size + ids % block_size
        codec.write(cache, slots, key, value, ids)
        places = ids[:, None]
        of_pages = [
            codec.key.decode(codec.key.encode(key, places), places),
            codec.value.decode(codec.value.encode(value, places), places),
        ]
        if ring is not None:
            is_recent = (ids >= first[i])[:, None, None]
            rotated = codec.prepare(key, torch.where(is_recent, value, 1e4), ids)
            there = ids[max(first[i] - early, 0) : prefix]
            ring_slots = ring.block_table[i, there // 32].long() * 32 + there % 32
            reference.write(ring.cache, ring_slots, *(x[there] for x in rotated))
            stored = [reference.round_trip(x).double() for x in rotated]
            from_ring = [x.transpose(0, 1) for x in codec.whole(*(x.transpose(0, 1) for x in stored), ids)]
            from_ring = [part.unrotate(x) for part, x in zip((codec.key, codec.value), from_ring, strict=True)]
            of_pages = [
                torch.where(is_recent, a.double(), b.double()) for a, b in zip(from_ring, of_pages, strict=True)
            ]
        if prefix:
            k, v = (x[:prefix].double().repeat_interleave(group, dim=1) for x in of_pages)
            scores = torch.einsum("qhd,khd->qhk", query[row : row + count].double(), k) * scale
            expected[row : row + count] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
            expected_lse[row : row + count] = scores.logsumexp(-1)
            squares.append(scores.square().mean())
        row += count
    passes = passes_of(list(chunks), list(prefixes), pass_tokens(group)) + [(0, 0, 0, 0)] * unused
    passes = [passes[i] for i in torch.randperm(len(passes), generator=generator).tolist()]
    of_passes = torch.tensor(passes, dtype=torch.int32, device=DEVICE)
    rotated_query = torch.empty(len(query), kv_heads, group, head_dim, dtype=torch.float16, device=DEVICE)
    means, value_means, bias, tiles = *(Means.of(part.transform) for part in codec.codecs), None, None
    if means is not None:
        columns = 1 + means.blocks + (value_means is not None)
        bias = torch.full((len(query), heads, columns), float("nan"), device=DEVICE)
        tiles = means.block_tokens // 32
    new = [prefix + torch.arange(count) for count, prefix in zip(chunks, prefixes, strict=True)]
    positions = torch.cat(new).to(DEVICE)
    rotate_query(query, rotation_matrix(codec.key, kv_heads), rotated_query, scale, means, positions, bias)
    page = page_layout(FORMATS[name], head_dim)
    inputs = grid_inputs(page, kv_heads, resident * kv_heads * (head_dim // 32) // 8 or 1)
    schedules = PrefixSchedules(len(passes), inputs, torch.device(DEVICE))
    schedule = schedules(of_passes)
    items = prefix_grid(len(passes), inputs).items
    assert len(schedule) == items <= schedules.items
    partials, stats = (torch.full((items, kv_heads, COLUMNS, n), float("nan"), device=DEVICE) for n in (head_dim, 2))
    output = torch.full(query.shape, float("nan"), dtype=torch.float32, device=DEVICE)
    lse = torch.full(query.shape[:2], float("nan"), device=DEVICE)
    batch = (rotated_query, table.to(DEVICE, torch.int32), of_passes, schedule, partials, stats, bias, ring, lse)
    kernel = emulated.CudaPrefix if DEVICE == "cpu" else CudaPrefix
    matrix = pack_matrix(rotation_matrix(codec.value, kv_heads, inverse=True), value_means)
    apart = output.view(rotated_query.shape)
    launch = kernel(page, matrix, schedules.counters, cache, ring, apart, tiles)
    run_once = partial(launch, items, prefix_arguments(*batch), apart)
    run_once()
    assert not schedules.counters.any(), "not left for the next launch"
    if DEVICE == "cuda":
        assert not rounds_that_differ(run_once, [output], lse=lse)
    size_of_scores = torch.stack(squares).mean().sqrt()
    return output.double(), lse.double(), expected, expected_lse, size_of_scores


def check(options: dict[str, Any]) -> None:
    """A log-sum-exp is no further off than scores are, whose operands are rounded to fp16 as those of outputs."""
    output, lse, expected, expected_lse, size_of_scores = run(**options)
    assert relative_rms(output, expected) < BOUND
    nothing = expected_lse.isinf()
    assert torch.equal(lse.isinf(), nothing) and not output[nothing].any()
    assert (lse - expected_lse)[~nothing].square().mean().sqrt() < BOUND * size_of_scores


@runs
@pytest.mark.parametrize(
    "options",
    [
        # Two warpgroups: one pass and several, whose last are short; prefixes that end within a micro-block or none.
        {"name": "tq4", "chunks": (9, 1, 3), "prefixes": (333, 16, 0)},
        {"name": "isoquant4", "chunks": (5, 12), "prefixes": (1001, 40), "resident": 2},
        # Teams.
        {"name": "tq3", "chunks": (6, 2), "prefixes": (333, 5)},
        {"name": "turboquant25", "chunks": (4, 5), "prefixes": (0, 700), "resident": 2},
        # Heads of 64; passes of 21 tokens of 3 query heads, one column left over.
        {"name": "isoquant4", "head_dim": 64, "group": 3, "chunks": (43, 21, 22), "prefixes": (150, 31, 64)},
        {"name": "turboquant25", "head_dim": 64, "group": 4, "kv_heads": 2, "chunks": (17, 30), "prefixes": (90, 33),
         "block_size": 32},
        gpu_only(name="tq4", group=4, kv_heads=8, chunks=(500, 16, 17, 1), prefixes=(9000, 4097, 40, 16), resident=66),
        gpu_only(name="tq3", group=4, kv_heads=8, chunks=(128, 15), prefixes=(9000, 33), resident=33),
        gpu_only(name="turboquant25", group=4, kv_heads=8, chunks=(128, 2), prefixes=(9000, 33), resident=33),
        gpu_only(name="turboquant35", group=8, kv_heads=2, chunks=(20, 200), prefixes=(300, 700), resident=9),
        gpu_only(name="isoquant4", head_dim=64, group=8, chunks=(128,), prefixes=(20000,), resident=33),
        gpu_only(name="tq4", group=1, kv_heads=4, chunks=(65, 64, 63), prefixes=(300, 16, 17)),
        gpu_only(name="tq4", head_dim=256, group=6, kv_heads=4, chunks=(40, 7), prefixes=(9000, 333), resident=33),
        gpu_only(name="turboquant25", head_dim=256, group=6, kv_heads=4, chunks=(70, 7), prefixes=(5000, 30)),
    ],
    ids=str,
)  # fmt: skip
def test_prefixes(options: dict[str, Any]) -> None:
    check(options)


@runs
@pytest.mark.parametrize(
    "options",
    [
        {"name": "tq4", "chunks": (5, 2), "prefixes": (333, 0), "resident": 2},
        {"name": "turboquant35", "head_dim": 64, "chunks": (5, 2), "prefixes": (133, 33), "resident": 2},
        gpu_only(name="turboquant25", group=4, chunks=(40, 17), prefixes=(3000, 50)),
        gpu_only(name="isoquant4", group=4, kv_heads=2, chunks=(40, 17, 5), prefixes=(3000, 50, 0)),
        gpu_only(name="tq4", head_dim=256, group=6, kv_heads=2, chunks=(40, 17), prefixes=(3000, 50)),
    ],
    ids=str,
)
def test_centred_and_scaled_prefixes(options: dict[str, Any]) -> None:
    check({"kv_heads": 2, **options, **transforms(options.get("head_dim", 128))})


@runs
@pytest.mark.parametrize(
    "options",
    [
        # The ring begins with the window of the chunk's first token, behind what a hit has, or past the prefix.
        {"name": "tq4", "chunks": (9, 5, 2), "prefixes": (333, 200, 40), "recent": 32, "hits": (0, 192, 64)},
        {"name": "isoquant4", "chunks": (3, 2), "prefixes": (20, 700), "recent": 64, "resident": 2},
        {"name": "isoquant4", "chunks": (3,), "prefixes": (50,), "recent": 1},
        # It begins before the window.
        {"name": "turboquant25", "head_dim": 64, "chunks": (5,), "prefixes": (90,), "recent": 16, "early": 20},
        gpu_only(name="tq4", chunks=(5,), prefixes=(90,), recent=16, early=20),
        {"name": "tq3", "chunks": (5, 2, 1), "prefixes": (333, 40, 0), "recent": 64, "hits": (320, 64, 0)},
        {"name": "turboquant25", "head_dim": 64, "group": 3, "chunks": (23, 5), "prefixes": (150, 30), "recent": 16},
        gpu_only(name="tq4", group=4, kv_heads=8, chunks=(100, 17), prefixes=(3000, 700), recent=256, resident=33),
        gpu_only(name="turboquant25", group=4, kv_heads=8, chunks=(100, 17), prefixes=(3000, 700), recent=256),
        gpu_only(name="tq4", head_dim=256, group=6, kv_heads=4, chunks=(50, 17), prefixes=(3000, 700), recent=64),
    ],
    ids=str,
)  # fmt: skip
def test_recent_tokens_of_prefixes(options: dict[str, Any]) -> None:
    check(options)


RESOURCES = [
    ("isoquant4", 64, True),
    ("isoquant4", 128, False),
    ("isoquant3", 128, True),
    ("turboquant35", 64, True),
    ("turboquant25", 128, True),
    ("tq4", 256, True),
]
"""Dtype, head size and whether keys have means, which take registers: a compilation takes up to 46 s."""


@pytest.mark.parametrize(
    ("name", "head_dim", "centred"),
    list(itertools.product(("isoquant4", "isoquant3", "turboquant35", "turboquant25"), (64, 128, 256), (False, True)))
    if EVERY
    else RESOURCES,
)
def test_resources(name: str, head_dim: int, centred: bool, tmp_path: Path) -> None:
    """An SM holds the warps of the grid; blocks with warps that only unpack spill nothing, and teams little."""
    page = page_layout(FORMATS[name], head_dim)
    few, _ = block_kinds(GridInputs(8, head_dim, 132, has_unpackers(page)), COLUMNS)
    variant = PairVariant(
        few.warps, True, COLUMNS, 16, ring_block=8, recent=64, has_bias=centred, output=torch.bfloat16,
        has_lse=True, tiles_a_block=8 * centred, has_pass_table=True,
    )  # fmt: skip
    values = constants(page, 8, 4, variant)
    file = tmp_path / "decode.cubin"
    file.write_bytes(machine_code(Compilation.of(source_of(values), values)))
    registers, stack, _ = resources(file)["decode"]
    blocks = few.warps_per_sm // few.warps
    threads, shared_bytes = block_of(file.read_bytes(), "decode")
    assert registers <= min(255, 65536 // (blocks * threads)) and stack <= (0 if int(values["UNPACKERS"]) else 192)
    assert blocks * (shared_bytes + 1024) <= 228 * 1024
