"""Kernels compile for every generation of GPUs from sm_80 on, with no GPU at hand, and ptxas spills nothing."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from compiling import EXACT_FMAS, Case, Resources, check_look_ups, compile_kernels
from packed_kv import FORMATS
from packed_kv.codecs.rotations import ROTATIONS
from packed_kv.formats import Format
from packed_kv.gpu_generations import generation_of
from packed_kv.kernels import power_of_2
from packed_kv.kernels.cuda.schedule import Scheduler
from packed_kv.kernels.kernel_layout import kernel_layout
from packed_kv.kernels.triton import (
    combine,
    decode,
    gather,
    means,
    merge,
    mixed_plan,
    records,
    ring,
    store,
    store_section,
)
from packed_kv.kernels.triton.quantize import Transform
from packed_kv.layout import MEAN_BLOCK, PageLayout, page_layout, ring_layout
from variants import EVERY

ARCHITECTURES = (80, 90, 100, 120)
GENERATIONS = (80, 86, 89, 90, 100, 120)
"""Of decodes, whose grids count on the programs that fit an SM."""
FEW_ARCHITECTURES = ARCHITECTURES if EVERY else (80, 90, 120)
FEW_GENERATIONS = GENERATIONS if EVERY else (80, 86, 90, 120)
"""The architectures, and the generations of decodes, for which CI compiles the kernels that take longest."""
STORED = {"tq4": False, "isoquant4": False, "planarquant3": False, "turboquant35": True, "turboquant25": False}
"""Name -> whether calibrated: outliers, scales and means by blocks of positions. Every rotation and width, with and
without half words."""
LOOKED_UP = {name: 4 in (FORMATS[name].bits, FORMATS[name].outlier_bits) for name in STORED}
"""Name -> whether it has codes of 4 bits, whose levels are looked up."""
MEAN_BLOCKS = 512
ROTATION = means.Rotation("*fp16", "i32", "i32", "i32", "fp32", "*fp32", "i32")

TWO_SIZES = ("tq4",)
"""Names that are also stored with V of fewer channels than K."""
RING_BLOCK = {"tq4": 8, "turboquant25": 4}
"""Name -> tokens of a ring's block; the others are stored without one."""


def store_case(
    fmt: Format, arch: int, calibrated: bool, head_dim: int = 128, query_group: int = 0, value_dim: int | None = None,
    key_bits: tuple[int, ...] | None = None, keeps_first: bool = False,
) -> Case:  # fmt: skip
    blocks, vectors = (
        records.Blocks("*u8", "i32", "i32"),
        store_section.Vectors("i32", "i32", "*i64", "i32", "*fp32", "i32"),
    )
    layer = store_section.StoreLayer(blocks, vectors, vectors, "*fp32", "*fp32", blocks)
    mean_blocks = (MEAN_BLOCKS, MEAN_BLOCK) if calibrated else (1, 0)
    layout = kernel_layout(page_layout(fmt, head_dim, key_bits=key_bits))
    constants = store_section.StoreConstants(
        8, (16, RING_BLOCK.get(fmt.name, 0)), Transform(fmt.rotation, calibrated, calibrated, calibrated, *mean_blocks),
        (head_dim, value_dim or head_dim), layout, store_section.rows_of(layout),
    )  # fmt: skip
    queries = None
    if query_group:
        programs = means.bias_programs(MEAN_BLOCKS) if calibrated else 0
        queries = means.QueryConstants(8, query_group, head_dim, layout.head_dim, programs, *mean_blocks, keeps_first)
    return Case(
        kernel="packed_kv.kernels.triton.store:store_kernel",
        arch=arch,
        types=dict(
            key_ptr="*bf16", value_ptr="*bf16", query_ptr="*bf16", slots_ptr="*i64", tokens="i32", positions_ptr="*i64",
            ring_slots_ptr="*i32", ring_tokens="i32", query_targets=("*fp16", "*fp32"), query_rows="i32",
            fixed=(layer, ROTATION),
        ),
        constants=dict(CONSTANTS=store.PairConstants(constants, queries)),
        options=dict(num_warps=1, enable_fp_fusion=False),
        unaligned=("tokens", "ring_tokens", "slots_ptr", "ring_slots_ptr", "query_rows"),
    )  # fmt: skip


@cache
def store_resources(arch: int) -> dict[str, Resources]:
    """In one process, as its start takes as long as compiling a case."""
    cases = {name: store_case(FORMATS[name], arch, STORED[name]) for name in STORED}
    cases |= {
        f"{name}, V of 128": store_case(FORMATS[name], arch, STORED[name], 192, value_dim=128) for name in TWO_SIZES
    }
    if arch == 90:
        cases["tq4, head_dim 80"] = store_case(FORMATS["tq4"], arch, False, head_dim=80)
    return dict(zip(cases, compile_kernels(list(cases.values())), strict=True))


def test_every_rotation_is_compiled():
    assert {FORMATS[name].rotation for name in STORED} == set(ROTATIONS), "STORED has a dtype of each rotation"


@pytest.mark.parametrize("arch", ARCHITECTURES, ids="sm_{}".format)
@pytest.mark.parametrize("name", STORED)
def test_store_stays_in_registers(name, arch):
    resources = store_resources(arch)[name]
    assert not resources.spills
    assert resources.shared_bytes == 0
    # 32 warps of an SM fill 64 Ki registers at 64 each. On sm_120, ptxas takes more with a ring, and with means by
    # blocks of positions, as yet not timed.
    assert resources.registers <= (80 if arch == 120 else 64)
    assert resources.count("RED") > 0 and resources.count("ATOM") == 0  # nothing waits for an atomic


def test_store_of_padded_heads_stays_in_registers():
    resources = store_resources(90)["tq4, head_dim 80"]
    assert not resources.spills
    assert resources.registers <= 64


@pytest.mark.parametrize("arch", ARCHITECTURES, ids="sm_{}".format)
@pytest.mark.parametrize("name", TWO_SIZES)
def test_store_of_values_of_fewer_channels_stays_in_registers(name, arch):
    """K of 192 channels."""
    resources = store_resources(arch)[f"{name}, V of 128"]
    assert not resources.spills
    assert resources.registers <= 80  # of two sections, with a ring


@pytest.mark.parametrize("arch", FEW_ARCHITECTURES, ids="sm_{}".format)
def test_store_that_rotates_queries_stays_in_registers(arch):
    names = ("tq4", "turboquant35")
    cases = [store_case(FORMATS[name], arch, STORED[name], query_group=4) for name in names]
    for name, resources in zip(names, compile_kernels(cases), strict=True):
        assert not resources.spills, name
        # 20 warps of an SM. On sm_80, ptxas takes more with means by blocks of positions, as yet not timed: 17 warps.
        assert resources.registers <= (114 if arch == 80 else 96), name
        assert resources.count("FFMA") == EXACT_FMAS, name
        # Queries and their matrix are loaded as the tensor core wants them: only the biases of means are converted.
        assert resources.shared_bytes <= (1024 if STORED[name] else 0), name


@pytest.mark.parametrize("arch", ARCHITECTURES, ids="sm_{}".format)
def test_store_rounds_each_operation(arch):
    """No flushing of denormals and no fused multiply-add, which would change bytes."""
    for name, resources in store_resources(arch).items():
        exact = EXACT_FMAS if LOOKED_UP[name.split(",")[0]] else 0
        assert resources.ptx.count("fma") == resources.count("FFMA") == exact, name
        assert ".ftz" not in resources.ptx


@pytest.mark.parametrize("name", [name for name in STORED if LOOKED_UP[name]])
def test_look_ups_stay_in_their_lanes(name):
    check_look_ups(store_resources(90)[name])


RINGS = (("isoquant4", 8), ("turboquant25", 4))
DECODED = ("isoquant4", "isoquant3", "turboquant35", "turboquant25")


def shape_of(page: PageLayout, arch: int, head_dim: int = 128, mean_blocks: int = 0) -> decode.DecodeShape:
    registers = decode.most_registers(page, generation_of(divmod(arch, 10)), has_bias=mean_blocks > 0)
    return decode.DecodeShape(8, 4, head_dim, bias=means.QueryBias(mean_blocks), max_registers=registers)


def check_grid(arch: int, shape: decode.DecodeShape, columns: int, found: Resources) -> None:
    """As many programs fit an SM as its grid counts on."""
    generation = generation_of(divmod(arch, 10))
    fit = generation.resident_blocks(found.registers, found.shared_bytes)
    assert fit >= shape.programs(columns, generation), (found.registers, found.shared_bytes)


def decode_case(
    fmt: Format, arch: int, head_dim: int = 128, ring_block: int = 0, mean_blocks: int = 0, columns: int = 8,
    keeps_first: bool = False, key_bits: tuple[int, ...] | None = None,
) -> Case:  # fmt: skip
    page = page_layout(fmt, head_dim, key_bits=key_bits)
    registers = shape_of(page, arch, head_dim, mean_blocks).register_limit(columns)
    return Case(
        kernel="packed_kv.kernels.triton.decode:_decode_kernel",
        arch=arch,
        types=dict(
            query="*fp16", query_bias="*fp32", block_table="*i32", query_start="*i32", seq_lens="*i32",
            partials=records.Partials("*fp32", "*fp32"), ring_table="*i32", ring_first="*i32", table_stride="i32",
            ring_table_stride="i32", layer=decode.DecodeLayer("*u8", "*u8", "i32", "i32", "i32", "i32", "fp32"),
        ),
        constants=dict(
            DECODE=decode.DecodeConstants(
                means.ColumnConstants(
                    8, columns // 2, columns, mean_blocks, 8 if mean_blocks > 1 else 0, 1 + mean_blocks + keeps_first
                ),
                0, False, 1, ring_block, 64 if ring_block else 0, kernel_layout(page),
            )
        ),
        options=dict(
            num_warps=1, num_stages=1, enable_fp_fusion=True,
            **({"maxnreg": registers} if registers else {}),
        ),
        unaligned=(
            "block_table", "query_start", "seq_lens", "ring_table", "ring_first", "table_stride", "ring_table_stride",
        ),
    )  # fmt: skip


@cache
def decode_resources(arch: int) -> dict[str, Resources]:
    return dict(zip(DECODED, compile_kernels([decode_case(FORMATS[name], arch) for name in DECODED]), strict=True))


@pytest.mark.parametrize("arch", GENERATIONS, ids="sm_{}".format)
@pytest.mark.parametrize("name", DECODED)
def test_decode_stays_in_registers(name, arch):
    resources = decode_resources(arch)[name]
    assert not resources.spills
    assert resources.registers <= decode.MAX_REGISTERS
    check_grid(arch, shape_of(page_layout(FORMATS[name], 128), arch), 8, resources)
    assert resources.count("LDG.E.128") >= 8  # two micro-blocks, K and V, before the loop and in it


def test_passes_over_a_window_stay_in_registers():
    """The variant has heads of 64 channels, means, and tiles of 32 columns, two for a pass of 64."""
    cases = [
        decode_case(FORMATS[name], 90, 64, ring_block=8, mean_blocks=8, columns=32, keeps_first=True)
        for name in ("tq4", "turboquant25")
    ]
    for case in cases:
        own = dict(sliding_window=128, recent=64, has_passes=True)
        case.constants["DECODE"] = case.constants["DECODE"]._replace(**own)
    for resources in compile_kernels(cases):
        assert not local_memory_in_the_loop(resources) and resources.stack_bytes <= 16


def local_memory_in_the_loop(resources: Resources) -> list[str]:
    """Spills on the usual path of the loop over pages."""
    return [text for text in resources.loop() if re.search(r"\b(LDL|STL)\b", text)]


@pytest.mark.parametrize("arch", FEW_GENERATIONS, ids="sm_{}".format)
def test_decode_with_a_ring_stays_in_registers(arch):
    cases = [decode_case(FORMATS[name], arch, ring_block=block) for name, block in RINGS]
    for case, resources in zip(RINGS, compile_kernels(cases), strict=True):
        assert not local_memory_in_the_loop(resources), case
        assert resources.stack_bytes <= 32, case
        check_grid(arch, shape_of(page_layout(FORMATS[case[0]], 128), arch), 8, resources)


@pytest.mark.parametrize("arch", FEW_GENERATIONS, ids="sm_{}".format)
def test_the_loop_over_pages_does_not_spill_beside_a_bias(arch):
    names = ("isoquant3", "turboquant35")
    cases = [decode_case(FORMATS[name], arch, mean_blocks=MEAN_BLOCKS) for name in names]
    for name, resources in zip(names, compile_kernels(cases), strict=True):
        assert not local_memory_in_the_loop(resources), name
        shape = shape_of(page_layout(FORMATS[name], 128), arch, mean_blocks=MEAN_BLOCKS)
        check_grid(arch, shape, 8, resources)


@pytest.mark.parametrize("mean_blocks", [1, MEAN_BLOCKS])
def test_a_bias_stays_in_registers(mean_blocks):
    names = ("isoquant4", "turboquant25")
    cases = [decode_case(FORMATS[name], 90, mean_blocks=mean_blocks) for name in names]
    for name, resources in zip(names, compile_kernels(cases), strict=True):
        assert not resources.spills, name
        assert resources.registers <= decode.MAX_REGISTERS, name


@pytest.mark.parametrize("arch", FEW_ARCHITECTURES, ids="sm_{}".format)
def test_wide_tiles_unpack_once(arch):
    """16 columns stay in registers; 32 spill some, and are faster than two tiles of 16 all the same."""
    columns, bounds = (16, 32), (8, 96)
    cases = [decode_case(FORMATS["isoquant4"], arch, columns=count) for count in columns]
    narrow = decode_resources(arch)["isoquant4"]
    for count, bound, wide in zip(columns, bounds, compile_kernels(cases), strict=True):
        assert wide.stack_bytes <= bound, count
        check_grid(arch, shape_of(page_layout(FORMATS["isoquant4"], 128), arch), count, wide)
        assert wide.count("HMMA") == count // 8 * narrow.count("HMMA"), count
        assert wide.count("PRMT") < 1.1 * narrow.count("PRMT"), count
        check_transposing_layout(wide)


@pytest.mark.parametrize("arch", GENERATIONS, ids="sm_{}".format)
def test_keys_of_five_bits_stay_in_registers(arch):
    bits, fmt = (5, 4, 4, 3), FORMATS["tq4"]
    (resources,) = compile_kernels([decode_case(fmt, arch, key_bits=bits)])
    assert not resources.spills and resources.shared_bytes <= 4096
    check_grid(arch, shape_of(page_layout(fmt, 128, key_bits=bits), arch), 8, resources)


@pytest.mark.parametrize("name", DECODED)
def test_decoded_fragments_need_no_shared_memory(name):
    """Queries come from shared memory once a tile and results go through it at the end; K and V never do."""
    resources = decode_resources(90)[name]
    assert resources.count("LDSM") <= 4
    assert resources.shared_bytes <= 4096


LANE_BY_LANE = re.compile(
    r"lane = \[\[1[, 0]*\], \[2[, 0]*\], \[4[, 0]*\], \[8[, 0]*\], \[16[, 0]*\]\]|threadsPerWarp = \[32, 1"
)


@pytest.mark.parametrize("name", DECODED)
def test_weights_are_transposed_lane_by_lane(name):
    check_transposing_layout(decode_resources(90)[name])


@pytest.mark.parametrize(
    ("head_dim", "columns"), [(32, 8), (64, 8), (96, 8), (160, 8), (32, 32), (64, 16), (64, 32), (96, 16), (96, 32)]
)
def test_weights_are_transposed_lane_by_lane_at_other_head_dims(head_dim, columns):
    (resources,) = compile_kernels([decode_case(FORMATS["isoquant4"], 90, head_dim, columns=columns)])
    check_transposing_layout(resources)


def check_transposing_layout(resources: Resources) -> None:
    """`movmatrix` moves words between lanes, so it is right only where lane i of the tensor is lane i of the warp.
    Triton could choose another layout, and would not know that the result is wrong."""
    (layout,) = re.findall(r"movmatrix.*-> tensor<[^,]*, (#\w+)>", resources.ttgir)
    (definition,) = re.findall(rf"^{layout} = (.*)", resources.ttgir, re.MULTILINE)
    assert LANE_BY_LANE.search(definition), definition


def merge_case(
    tile: tuple[int, int], arch: int, sinks: bool = False, lse: bool = False, head_dim: int = 128, bias_columns: int = 0
) -> Case:
    """The merge for 128 channels of V, in vectors of `head_dim`. `bias_columns`: with means of V."""
    dims = merge.MergeDims(head_dim, 128, 128, head_dim & -head_dim)
    matrix, of_lse = (("*fp16", "*fp32", "i32"), ("*fp32", "*fp32")) if bias_columns else ("*fp16", "*fp32")
    return Case(
        kernel="packed_kv.kernels.triton.merge:_merge_kernel",
        arch=arch,
        types=dict(
            partial_output="*fp32", partial_stats="*fp32", matrix=matrix, output="*bf16", rows="i32",
            token_stride="i32", head_stride="i32", matrix_head_stride="i32", splits="i32",
            sinks="*bf16", lse=of_lse,
        ),
        constants=dict(MERGE=merge.MergeConstants(8, 4, dims, tile, sinks, lse, bias_columns)),
        options=dict(num_warps=8 if tile[1] >= 8 or head_dim > 128 else 4),
        unaligned=("rows", "splits"),
    )  # fmt: skip


def rotate_query_case() -> Case:
    """The rotation of heads of 80 channels."""
    return Case(
        kernel="packed_kv.kernels.triton.rotate:_rotate_query_kernel",
        arch=90,
        types=dict(
            query="*bf16", positions="*i64", rotated="*fp16", bias="*fp32", rows="i32", rotation=ROTATION,
            spectrum="*fp32",
        ),
        constants=dict(
            QUERIES=means.QueryConstants(8, 4, 80, 96, means.bias_programs(MEAN_BLOCKS), MEAN_BLOCKS, MEAN_BLOCK, False)
        ),
        options=dict(num_warps=1),
        unaligned=("rows", "positions"),
    )  # fmt: skip


def unrotate_case(head_dim: int) -> Case:
    return Case(
        kernel="packed_kv.kernels.triton.gather:_unrotate_kernel",
        arch=90,
        types=dict(
            vectors="*fp16", positions="*i32", result="*bf16", rows="i32", matrix="*fp16", means="*fp32",
            spectrum="*fp32", matrix_head_stride="i32", means_head_stride="i32",
        ),
        constants=dict(
            UNROTATE=gather.UnrotateConstants(
                8, head_dim, power_of_2(head_dim), gather.ROWS_A_PROGRAM, MEAN_BLOCKS, MEAN_BLOCK
            )
        ),
        options=dict(num_warps=4),
        unaligned=("rows", "positions"),
    )  # fmt: skip


def sinks_case(are_all: bool = True) -> Case:
    return Case(
        kernel="packed_kv.kernels.triton.combine:_sinks_kernel",
        arch=90,
        types=dict(
            output="*bf16", lse="*fp32", row_kinds="*fp32" if are_all else "*i32", lse_stride="i32", sinks="*bf16",
            output_token_stride="i32", output_head_stride="i32",
        ),
        constants=dict(OUTPUT=combine.OutputConstants(64, 64, 64, 64), ARE_ALL=are_all),
        options=dict(num_warps=4),
        unaligned=("lse", "row_kinds", "lse_stride"),
    )  # fmt: skip


def share_case() -> Case:
    return Case(
        kernel="packed_kv.kernels.triton.combine:_share_kernel",
        arch=90,
        types=dict(output="*bf16", lse="*fp32", rank_lse="*fp32"),
        constants=dict(RANK=1, RANKS=2, OUTPUT=combine.OutputConstants(64, 64, 128, 128)),
        options=dict(num_warps=4),
    )  # fmt: skip


def plan_ring_case() -> Case:
    pointers = ("query_start", "seq_lens", "table", "slots", "first")
    return Case(
        kernel="packed_kv.kernels.triton.ring:_plan_kernel",
        arch=90,
        types={**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(("requests", "tokens", "table_stride"), "i32")},
        constants=dict(PLAN=ring.PlanConstants(64, 8, 10, 1, 16)),
        options=dict(num_warps=4),
        unaligned=("requests", "tokens", "table_stride"),
    )


def schedule_case(requests: int, stream_k: bool) -> Case:
    scheduler = Scheduler(requests, 33, 8 if stream_k else 4, torch.device("cpu"), stream_k=stream_k)
    return Case(
        kernel="packed_kv.kernels.cuda.schedule:_schedule_kernel",
        arch=90,
        types={
            **dict.fromkeys(("items", "seq_lens"), "*i32"),
            **dict.fromkeys(("requests", "item_count", "resident_blocks", "passes", "stride"), "i32"),
        },
        constants=scheduler.constants,
        options=dict(num_warps=scheduler.num_warps),
        unaligned=("items", "seq_lens", "requests", "item_count", "resident_blocks", "passes", "stride"),
    )


def gather_ring_case() -> Case:
    return Case(
        kernel="packed_kv.kernels.triton.ring:_gather_ring_kernel",
        arch=90,
        types=dict(
            table="*i32", first="*i32", spans="*i32", key="*fp16", value="*fp16", table_stride="i32",
            ring=records.Blocks("*u8", "i32", "i32"),
        ),
        constants=dict(KV_HEADS=8, GROUPS=4, BLOCK=8, RING=ring_layout(128)),
        options=dict(num_warps=4),
        unaligned=("table", "first", "spans", "table_stride"),
    )  # fmt: skip


def plan_mixed_case() -> Case:
    return Case(
        kernel="packed_kv.kernels.triton.mixed_plan:_plan_mixed_kernel",
        arch=90,
        types=dict(
            query_start="*i32", seq_lens="*i32", slots="*i32",
            tables=mixed_plan.MixedTables(*["*i32"] * len(mixed_plan.MixedTables._fields)), tokens="i32", most="i32",
        ),
        constants=dict(PADDED=256, LONGEST=1, PASS_TOKENS=16, HAS_RING=True, LANES=mixed_plan.LANES),
        options=dict(num_warps=4),
        unaligned=("tokens", "most"),
    )  # fmt: skip


def combine_case() -> Case:
    strides = ("lse_stride", "part_lse_head_stride", "part_lse_token_stride")
    return Case(
        kernel="packed_kv.kernels.triton.combine:_combine_kernel",
        arch=90,
        types=dict(
            output="*bf16", lse="*fp32", part_lse="*fp32", part="*bf16", row_kinds="*i32",
            **dict.fromkeys(strides, "i32"), output_token_stride="i32", output_head_stride="i32",
        ),
        constants=dict(OUTPUT=combine.OutputConstants(32, 32, 128, 128), PART=combine.PartConstants(128, False)),
        options=dict(num_warps=4),
        unaligned=("lse", "part_lse", "row_kinds", *strides),
    )  # fmt: skip


def test_what_stands_around_decode_stays_in_registers():
    merges = [(tile, arch) for tile in merge.MERGE_TILES for arch in (80, 120)] + [
        ((8, 8), 90, True),
        ((8, 8), 90, False, True),
        *((tile, 90, True, False, 192) for tile in ((8, 8), (128, 1))),
    ]
    cases = [merge_case(*key) for key in merges]
    cases += [rotate_query_case(), sinks_case(), sinks_case(are_all=False), share_case()]
    cases += [plan_ring_case(), gather_ring_case()]
    cases += [plan_mixed_case(), combine_case()]
    cases += [unrotate_case(head_dim) for head_dim in (128, 256)]
    schedules = [(66, True), (256, False), (256, True)]
    cases += [schedule_case(*key) for key in schedules]
    keys = [
        *merges,
        "rotate_query",
        "sinks",
        "sinks of chunks",
        "share",
        "plan_ring",
        "gather_ring",
        "plan_mixed",
        "combine",
        "unrotate 128",
        "unrotate 256",
        *schedules,
    ]
    for key, resources in zip(keys, compile_kernels(cases), strict=True):
        assert not resources.spills, key
        assert resources.shared_bytes <= 99 * 1024, key  # what a program of sm_120 can have
