"""Latent attention's Triton kernels compile from sm_80 on, with no GPU at hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compiling import EXACT_FMAS, Case, Resources, check_look_ups, compile_kernels
from packed_kv.formats import FORMATS, Format
from packed_kv.gpu_generations import generation_of
from packed_kv.kernels.kernel_layout import kernel_layout, latent_row_layout, rope_layout
from packed_kv.kernels.triton import (
    latent_decode,
    latent_gather,
    latent_ring,
    latent_rows,
    records,
    sparse_picks,
    store_section,
)
from packed_kv.kernels.triton.latent_store import parts_of
from packed_kv.kernels.triton.quantize import Transform
from packed_kv.layout import latent_layout, ring_layout, row_layout

RANK, ROPE_DIM = 512, 64
SPILLED_BYTES = 160
"""Bytes that a thread with 16 rows spills, which has the most registers that there are: its stack is read a few times a
tile."""


def sizes(fmt: Format, rope_bits: int = 16) -> dict:
    page = latent_layout(fmt, RANK, ROPE_DIM, rope_bits)
    return dict(ROPE=rope_layout(page), LAYOUT=kernel_layout(page))


def decode_case(fmt: Format, arch: int, rope_bits: int, rows: int = 16) -> Case:
    strides, page = records.Strides("i32", "i32"), latent_layout(fmt, RANK, ROPE_DIM, rope_bits)
    return Case(
        kernel="packed_kv.kernels.triton.latent_decode:_decode_latents_kernel",
        arch=arch,
        types=dict(
            q_latent="*bf16", q_rope="*bf16", block_table="*i32", query_start="*i32", seq_lens="*i32",
            partial_output="*fp32", partial_stats="*fp32", table_stride="i32", splits="i32",
            layer=latent_decode.LatentLayer("*u8", "i32", strides, strides, "fp32"),
        ),
        constants=dict(
            DECODE=latent_decode.DecodeLatentsConstants(
                16, rows, latent_decode.MICRO_BLOCKS, 1, 4, rope_layout(page), kernel_layout(page)
            )
        ),
        options=dict(num_warps=latent_decode.MICRO_BLOCKS, num_stages=1),
        unaligned=("q_latent", "q_rope", "block_table", "query_start", "seq_lens", "table_stride", "splits"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arch", "rope_bits"),
    [("tq4", 80, 8), ("tq4", 90, 16), ("tq4", 90, 8), ("turboquant25", 100, 16), ("tq3", 120, 8)],
)
def test_decode_compiles(name: str, arch: int, rope_bits: int) -> None:
    (resources,) = compile_kernels([decode_case(FORMATS[name], arch, rope_bits)])
    assert resources.stack_bytes <= SPILLED_BYTES
    check_grid(arch, 16, resources)
    assert resources.count("LDG.E.128") >= 8


def check_grid(arch: int, rows: int, found: Resources) -> None:
    """As many programs fit an SM as its grid counts on: at least one."""
    generation = generation_of(divmod(arch, 10))
    counted = latent_decode.programs(latent_decode.LatentShape(16, rows, 1.0), generation)
    fit = generation.resident_blocks(found.registers, found.shared_bytes, latent_decode.MICRO_BLOCKS)
    assert fit >= counted >= 1, (found.registers, found.shared_bytes)


@pytest.mark.parametrize("arch", [80, 89, 90], ids="sm_{}".format)
def test_programs_of_many_rows_fit(arch: int) -> None:
    """On sm_89, one for each SM: two have more shared memory than there is."""
    (resources,) = compile_kernels([decode_case(FORMATS["tq4"], arch, 16, rows=32)])
    check_grid(arch, 32, resources)


def store_case(fmt: Format, arch: int, rope_bits: int) -> Case:
    layout = kernel_layout(latent_layout(fmt, RANK, ROPE_DIM, rope_bits))
    vectors = store_section.Vectors("i32", "i32", "*i64", "i32", "*fp32", "i32")
    blocks = records.Blocks("*u8", "i32", "i32")
    constants = store_section.StoreConstants(
        1, (16, 4), Transform(fmt.rotation, True, True, False, 1, 0), (RANK, RANK), layout,
        store_section.rows_of(layout), None, parts_of(layout),
    )  # fmt: skip
    return Case(
        kernel="packed_kv.kernels.triton.latent_store:store_latents_kernel",
        arch=arch,
        types=dict(
            latent_ptr="*bf16", rope_ptr="*bf16", slots_ptr="*i64", tokens="i32", split="i32", ring_slots_ptr="*i32",
            ring_tokens="i32", layer=store_section.StoreLayer(blocks, vectors, vectors, "*fp32", "*fp32", blocks),
            rope_token_stride="i32",
        ),
        constants=dict(STORE=constants, ROPE=rope_layout(latent_layout(fmt, RANK, ROPE_DIM, rope_bits))),
        options=dict(num_warps=1, enable_fp_fusion=False),
        unaligned=("tokens", "split", "slots_ptr", "ring_tokens", "ring_slots_ptr"),
    )  # fmt: skip


def test_look_ups_stay_in_their_lanes() -> None:
    (stored,) = compile_kernels([store_case(FORMATS["tq4"], 90, 16)])
    assert stored.registers <= 64 and not stored.spills
    check_look_ups(stored)
    assert stored.ptx.count("fma") == stored.count("FFMA") == EXACT_FMAS


@pytest.mark.parametrize(("arch", "rope_bits"), [(80, 16), (90, 8), (100, 16)])
def test_store_and_gather_stay_in_registers(arch: int, rope_bits: int) -> None:
    fmt = FORMATS["turboquant25"]
    storing = store_case(fmt, arch, rope_bits)
    gather = Case(
        kernel="packed_kv.kernels.triton.latent_gather:_gather_latents_kernel",
        arch=arch,
        types=dict(
            rows="*bf16", block_table="*i32", starts="*i32", first_rows="*i32", table_stride="i32", cache="*u8",
            block_stride="i32",
        ),
        constants=dict(MICRO_BLOCKS=latent_gather.MICRO_BLOCKS, MICRO_BLOCKS_A_BLOCK=1, **sizes(fmt, rope_bits)),
        options=dict(num_warps=latent_gather.MICRO_BLOCKS, num_stages=1),
        unaligned=("rows", "block_table", "starts", "first_rows", "table_stride"),
    )  # fmt: skip
    stored, gathered = compile_kernels([storing, gather])
    assert not stored.spills and not gathered.spills
    assert "fma" not in stored.ptx and stored.count("FFMA") == 0  # bytes are the codec's


@pytest.mark.parametrize(
    ("name", "arch", "rope_bits"), [("tq4", 80, 16), ("tq4", 90, 16), ("tq3", 90, 8), ("turboquant25", 90, 16)]
)
def test_rows_stay_in_registers(name: str, arch: int, rope_bits: int) -> None:
    """Rows are loaded by 16 bytes a lane and stored by 16 bytes, too."""
    fmt = FORMATS[name]
    row = latent_row_layout(row_layout(fmt, RANK, ROPE_DIM, rope_bits))
    storing = store_case(fmt, arch, rope_bits)
    of_rows = storing.constants["STORE"]._replace(block_sizes=(64, 0), latent_rows=row)
    constants = dict(STORE=of_rows, ROPE=row.rope)
    numbers = ("count", "table_stride", "columns", "block_stride")
    gather = Case(
        kernel="packed_kv.kernels.triton.latent_rows:_gather_rows_kernel",
        arch=arch,
        types=dict(
            rows="*bf16", positions="*i32", block_table="*i32", requests="*i32", cache="*u8",
            **dict.fromkeys(numbers, "i32"),
        ),
        constants=dict(A_REQUEST=2048, BLOCK_SIZE=64, ROW=row),
        options=dict(num_warps=latent_rows.EIGHTS, num_stages=1),
        unaligned=("positions", "count", "block_table", "requests", "table_stride", "columns"),
    )  # fmt: skip
    stored, gathered = compile_kernels([replace(storing, constants=constants), gather])
    print(stored.registers, gathered.registers, gathered.shared_bytes, gathered.count("LDG"), gathered.count("STG"))
    assert not stored.spills and not gathered.spills
    assert gathered.count("LDG.E.128") >= 4 and gathered.count("STG.E.128") == gathered.count("STG")
    assert gathered.shared_bytes <= 99 << 10


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_picks_are_split_merged_and_rescaled_in_registers(arch: int) -> None:
    split = Case(
        kernel="packed_kv.kernels.triton.sparse_picks:_split_picks_kernel",
        arch=arch,
        types=dict.fromkeys(
            ("picks", "first_own", "stored_offset", "own_offset", "stored", "stored_counts", "own", "own_counts"),
            "*i32",
        ),
        constants=dict(PICKS=2048, PADDED=2048),
        options=dict(num_warps=8),
        unaligned=("picks", "first_own", "stored_offset", "own_offset"),
    )
    picked = sparse_picks.Picked("*fp32", "*i32")
    merge = Case(
        kernel="packed_kv.kernels.triton.sparse_picks:_merge_picks_kernel",
        arch=arch,
        types=dict(
            output="*bf16", stored="*bf16", own="*bf16", lse="*fp32", of_stored=picked, of_own=picked,
            lse_stride="i32", picks="i32", inverse_gain="*fp32", constant="*fp32", token_stride="i32",
        ),
        constants=dict(MERGE=sparse_picks.MergePicksConstants(16, RANK, True, True, True)),
        options=dict(num_warps=2),
        unaligned=("lse", "lse_stride", "picks"),
    )  # fmt: skip
    sinks = Case(
        kernel="packed_kv.kernels.triton.sparse_picks:_pick_sinks_kernel",
        arch=arch,
        types=dict(
            output="*bf16", query="*bf16", lse="*fp32", sinks="*fp32", mean="*fp32", scale="fp32",
            query_token_stride="i32", query_head_stride="i32",
        ),
        constants=dict(HEADS=32, RANK=RANK, HAS_MEAN=True),
        options=dict(num_warps=2),
    )  # fmt: skip
    for resources in compile_kernels([split, merge, sinks]):
        assert not resources.spills


@pytest.mark.parametrize("arch", [80, 90, 120])
def test_attention_over_rings_compiles(arch: int) -> None:
    strides = records.Strides("i32", "i32")
    case = Case(
        kernel="packed_kv.kernels.triton.latent_ring:_attend_latent_ring_kernel",
        arch=arch,
        types=dict(
            q_latent="*bf16", q_rope="*bf16", output="*bf16", table="*i32", query_start="*i32", seq_lens="*i32",
            page_lens="*i32", part="*fp32", lse="*fp32", table_stride="i32",
            layer=latent_ring.LatentRingLayer("*u8", "i32", strides, strides, strides, "*fp32", "*fp32", "fp32"),
        ),
        constants=dict(
            ATTEND=latent_ring.AttendRingConstants(
                16, 16, latent_ring.TILE_TOKENS, 8, RANK, ROPE_DIM, True, ring_layout(RANK + ROPE_DIM, 1)
            )
        ),
        options=dict(num_warps=latent_ring.WARPS, num_stages=1),
        unaligned=("q_latent", "q_rope", "table", "query_start", "seq_lens", "page_lens", "table_stride"),
    )  # fmt: skip
    (resources,) = compile_kernels([case])
    print(resources.registers, resources.stack_bytes, resources.shared_bytes)
    assert resources.stack_bytes <= (32 if arch == 120 else 0)
    assert resources.shared_bytes <= 99 << 10
