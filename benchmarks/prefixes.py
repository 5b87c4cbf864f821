"""Time of a chunk's attention over its prefix in packed pages: read where it lies, or gathered first.

    python benchmarks/prefixes.py [--dtypes NAME ...] [--head-dims N ...] [--shapes NxPREFIX ...] [--passes N ...]
        [--group N] [--csv FILE]

N requests have a prefix of so many tokens, and a chunk of as many new tokens as the passes hold (64 columns each,
--group query heads of a KV head). `passes`: the CUDA kernel reads the pages once for each pass. `gather`: they are
unpacked into a workspace, rotated back and read by FlashAttention 3 of vLLM. Each is timed alone and with what it takes
besides: the rotation of the queries there, what unpacks here. Neither has the chunk's attention over itself and the
addition to it, which are the same for both. Caches of several layers are used in turn, so that the L2 does not serve
them; a CUDA graph holds one round.

Then FlashAttention is given rows before its first sequence (`cu_seqlens[0]` > 0), as a step whose decodes come first
would: its result, whether it leaves those rows alone, and its time beside that of the rows alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from packed_kv.attention.passes import PassLimits, plan_passes
from packed_kv.attention.prefix import Span, key_part
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.cuda import COLUMNS, grids, pass_tokens
from packed_kv.kernels.cuda import launch as cuda
from packed_kv.kernels.cuda.kernel import machine_code
from packed_kv.kernels.cuda.prefix_launch import THIRDS, CudaPrefix, PrefixSchedules, prefix_arguments
from packed_kv.kernels.triton.gather import GatherLaunch, UnrotateLaunch
from packed_kv.kernels.triton.rotate import QueryRotation, RotateQueryLaunch, rotation_matrix
from packed_kv.layout import page_layout
from pair_kernels import BLOCK_SIZE, KV_HEADS, LAYERS, interleaved
from rows import append, commit_here, machine

DECODE_ROWS, CHUNK_ROWS = 64, 128
"""Rows of decodes and of a chunk, of the step for `cu_seqlens[0]` > 0."""

Round = Callable[[], None]


def flash_attention(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vLLM's FlashAttention 3, its output and lse."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    return flash_attn_varlen_func(*tensors, fa_version=3, return_softmax_lse=True, **options)


class Case:
    """A step's chunks behind their prefixes, and several layers' pages of these, of random codes.

    `passes`: that each chunk takes.
    """

    def __init__(self, name: str, head_dim: int, requests: int, prefix: int, passes: int, group: int) -> None:
        self.codec = PagedCodec(FORMATS[name], head_dim, device="cuda")
        self.page = page_layout(FORMATS[name], head_dim)
        self.requests, self.prefix, self.passes, self.group = requests, prefix, passes, group
        self.tokens = passes * pass_tokens(group)
        blocks = requests * -(-prefix // BLOCK_SIZE)
        shape = (blocks, KV_HEADS, BLOCK_SIZE, self.codec.slot_bytes)
        self.caches = [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
        for cache in self.caches:
            scales = cache.view(blocks, KV_HEADS, BLOCK_SIZE // 16, -1)[..., self.page.plane(0, "scales").offset :]
            scales.copy_(torch.randint(0x64, 0x74, scales.shape, dtype=torch.uint8, device="cuda"))
        self.table = torch.randperm(blocks, device="cuda").to(torch.int32).view(requests, -1)
        heads = KV_HEADS * group
        self.query = torch.randn(requests * self.tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        self.output, self.lse = torch.empty_like(self.query), torch.empty(*self.query.shape[:2], device="cuda")
        self.starts = self.tokens * torch.arange(requests + 1, dtype=torch.int32, device="cuda")

    def kernel(self, cache: torch.Tensor, counters: torch.Tensor) -> CudaPrefix:
        """Return the CUDA kernel over a layer's pages."""
        matrix = cuda.pack_matrix(rotation_matrix(self.codec.value, KV_HEADS, inverse=True))
        output = self.output.view(len(self.output), KV_HEADS, self.group, -1)
        return CudaPrefix(self.page, matrix, counters, cache, None, output, None)

    def in_passes(self, thirds: int) -> dict[str, Round]:
        """Return the rounds of `passes`. `thirds`: of a block's load, see `Scheduler`."""
        inputs = grids.grid_inputs(self.page, KV_HEADS, torch.cuda.get_device_properties(0).multi_processor_count)
        passes = plan_passes(
            self.starts.tolist(), [self.prefix + self.tokens] * self.requests, 0,
            PassLimits(self.passes, self.requests * self.passes, pass_tokens(self.group), len(self.query)),
        )  # fmt: skip
        table, head_dim = torch.tensor(passes, dtype=torch.int32, device="cuda"), self.query.shape[2]
        schedules = PrefixSchedules(len(passes), inputs, table.device, thirds)
        schedule = schedules(table)
        rotated = torch.empty(len(self.query), KV_HEADS, self.group, head_dim, dtype=torch.float16, device="cuda")
        partial, stats = (torch.empty(len(schedule), KV_HEADS, COLUMNS, n, device="cuda") for n in (head_dim, 2))
        batch = (rotated, self.table, table, schedule, partial, stats, None, None, self.lse)
        step = prefix_arguments(*batch), batch  # they are addresses: the tensors have to stay
        rotation = QueryRotation(rotation_matrix(self.codec.key, KV_HEADS), head_dim**-0.5)
        rotate = RotateQueryLaunch(self.query, KV_HEADS, rotation)
        of_rotation = RotateQueryLaunch.step(rotated, rotation)
        kernels = [self.kernel(cache, schedules.counters) for cache in self.caches]
        output = self.output.view(rotated.shape)

        def attend(rotates: bool) -> None:
            for kernel in kernels:
                if rotates:
                    rotate(of_rotation.launch.grid, (self.query,), of_rotation.launch.arguments)
                kernel(len(schedule), step[0], output)

        attend(True)
        return {"passes all": lambda: attend(True), "passes": lambda: attend(False)}

    def gathered(self) -> dict[str, Round]:
        """Return the rounds of `gather`."""
        spans = [Span(request, self.tokens, 0, self.prefix) for request in range(self.requests)]
        part = key_part(spans, self.starts.tolist(), self.table, BLOCK_SIZE)
        head_dim = self.query.shape[2]
        key, value = (
            torch.empty(part.tokens, KV_HEADS, head_dim, dtype=torch.float16, device="cuda") for _ in range(2)
        )
        step = GatherLaunch.step(part.micro_blocks, part.rows, key, value)
        unrotate = [
            (UnrotateLaunch(rotation_matrix(codec, KV_HEADS, inverse=True), KV_HEADS, head_dim, None),
             UnrotateLaunch.step(vectors, torch.bfloat16))
            for codec, vectors in ((self.codec.key, key), (self.codec.value, value))
        ]  # fmt: skip
        launches = [GatherLaunch(self.page, cache, KV_HEADS) for cache in self.caches]

        def attend(unpacks: bool, attends: bool) -> None:
            for launch in launches:
                if unpacks:
                    launch(step.grid, (), step.arguments)
                    for turn, turned in unrotate:
                        turn(turned.grid, (), turned.arguments)
                if attends:
                    flash_attention(
                        self.query, key.view(torch.bfloat16), value.view(torch.bfloat16), **part.lengths, causal=False,
                        softmax_scale=head_dim**-0.5, out=self.output,
                    )  # fmt: skip

        attend(True, True)
        return {
            "gather all": lambda: attend(True, True),
            "gather": lambda: attend(True, False),
            "flash": lambda: attend(False, True),
        }


def check_rows_before(head_dim: int, group: int) -> None:
    """Print what FlashAttention makes of rows before its first sequence."""
    rows, heads = DECODE_ROWS + CHUNK_ROWS, KV_HEADS * group
    query = torch.randn(rows, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    key, value = (torch.randn(rows, KV_HEADS, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    before = torch.randn_like(query)

    def attend(first: int, starts: Sequence[int], output: torch.Tensor) -> torch.Tensor:
        """Return the lse of the rows from `first` on."""
        lengths = torch.tensor(starts, dtype=torch.int32, device="cuda")
        return flash_attention(
            query[first:], key[first:], value[first:], cu_seqlens_q=lengths, cu_seqlens_k=lengths,
            max_seqlen_q=CHUNK_ROWS, max_seqlen_k=CHUNK_ROWS, causal=True, softmax_scale=head_dim**-0.5, out=output,
        )[1]  # fmt: skip

    expected, output = torch.empty_like(query[DECODE_ROWS:]), before.clone()
    lse = attend(DECODE_ROWS, (0, CHUNK_ROWS), expected)
    of_all = attend(0, (DECODE_ROWS, rows), output)
    one_each = (*range(DECODE_ROWS + 1), rows)
    print(
        f"FlashAttention, {head_dim} channels, cu_seqlens ({DECODE_ROWS}, {rows}): rows behind differ by",
        f"{(output[DECODE_ROWS:] - expected).abs().max().item():.1e}, their lse by",
        f"{(of_all[:, DECODE_ROWS:] - lse).abs().max().item():.1e}; rows before are",
        "left alone" if torch.equal(output[:DECODE_ROWS], before[:DECODE_ROWS]) else "WRITTEN",
    )
    of_rows = torch.tensor((0, CHUNK_ROWS), dtype=torch.int32, device="cuda")
    lists = {"rows alone": (DECODE_ROWS, of_rows), "rows before": (0, of_rows + DECODE_ROWS)}
    lists["decodes of one row"] = (0, torch.tensor(one_each, dtype=torch.int32, device="cuda"))

    def round_of(first: int, lengths: torch.Tensor) -> Round:
        out = torch.empty_like(query[first:])

        def attend_layers() -> None:
            for _ in range(LAYERS):
                flash_attention(
                    query[first:], key[first:], value[first:], cu_seqlens_q=lengths, cu_seqlens_k=lengths,
                    max_seqlen_q=CHUNK_ROWS, max_seqlen_k=CHUNK_ROWS, causal=True, softmax_scale=head_dim**-0.5,
                    out=out,
                )  # fmt: skip

        return attend_layers

    times = interleaved({name: round_of(*what) for name, what in lists.items()})
    print("  " + ", ".join(f"{name} {p50:.1f} us" for name, (_, p50, _) in times.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["tq4", "tq3", "turboquant25"], choices=FORMATS, metavar="DTYPE")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64], choices=(64, 128, 256))
    parser.add_argument("--shapes", nargs="+", default=["1x8192", "4x2048"], metavar="NxPREFIX")
    parser.add_argument(
        "--passes", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of a request (default: 1 2 4 8 16)"
    )
    parser.add_argument("--group", type=int, default=4, help="query heads of a KV head (default: 4)")
    parser.add_argument("--thirds", type=int, default=THIRDS, help="of a block's load that a part has (schedule.py)")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of this code, where there is no git")
    options = parser.parse_args()
    began, made_with = time.monotonic(), {**machine(), "commit": options.commit or commit_here()}
    for head_dim in options.head_dims:
        check_rows_before(head_dim, options.group)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    everything = itertools.product(options.head_dims, options.dtypes, shapes, options.passes)
    cases = [(*case, options.group) for case in everything]
    wanted = {}
    for head_dim, name in {(head_dim, name): None for head_dim, name, *_ in cases}:
        case = Case(name, head_dim, 1, BLOCK_SIZE, 1, options.group)
        wanted[case.kernel(case.caches[0], case.starts).compilation(None)] = None
    with ThreadPoolExecutor() as threads:
        list(threads.map(machine_code, wanted))
    print(f"{len(wanted)} kernels compiled after {time.monotonic() - began:.0f} s", flush=True)
    for head_dim, name, (requests, prefix), passes, group in cases:
        made = Case(name, head_dim, requests, prefix, passes, group)
        times = interleaved({**made.in_passes(options.thirds), **made.gathered()})
        found = {name: times[name][1] for name in times}
        share = found["passes all"] / found["gather all"]
        case = f"{name:13} {head_dim:3} channels, {requests} x {prefix:5}, {passes:2} passes"
        in_passes = f"{found['passes all']:7.1f} us (kernel {found['passes']:7.1f})"
        parts = f"unpacked {found['gather']:6.1f}, FlashAttention {found['flash']:6.1f}"
        print(f"{case}: {in_passes}, gathered {found['gather all']:7.1f} us ({parts}): {share:.2f}", flush=True)
        if options.csv:
            columns = {f"{what.replace(' ', '_')}_us": f"{microseconds:.1f}" for what, microseconds in found.items()}
            row: dict[str, object] = {
                "dtype": name, "head_dim": head_dim, "requests": requests, "prefix": prefix, "passes": passes,
                "group": group, "thirds": options.thirds,
            }  # fmt: skip
            append(options.csv, {**row, **columns, **made_with})
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
