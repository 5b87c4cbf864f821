"""Time of the decode kernels a layer: rotate the query, attend over packed pages, merge and rotate back.

    python benchmarks/kernels.py [--dtypes NAME ...] [--splits N ...] [--csv FILE]

Caches of several layers are used in turn, so that the L2 does not serve them; a CUDA graph holds one round, and its
replays are timed with events. `attention` is without the rotation of the query: the decode kernel and the merge.
`bandwidth` is the packed bytes over that, as a share of what a copy of 4 GB moves on the same card. 32 query and 8 KV
heads of 128 channels, as in an 8B model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import triton
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels import decode as decode_module
from packed_kv.kernels.decode import decode
from packed_kv.kernels.merge import merge, rotate_query, rotation_matrix
from packed_kv.layout import page_layout
from rows import append, commit_here, machine

SHAPES = ((32, 8192), (128, 2048), (1, 32768), (8, 32768))
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 32, 8, 128, 16


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy, read and written."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.numel() / milliseconds * 1e3


def time_layer(name: str, requests: int, context: int, splits: int, registers: int) -> tuple[list[float], list[float]]:
    """p20, p50 and p80 of microseconds a layer: all three kernels; attention and merge."""
    codec, page = PagedCodec(FORMATS[name], HEAD_DIM, device="cuda"), page_layout(FORMATS[name], HEAD_DIM)
    blocks = requests * context // BLOCK_SIZE
    shape = (blocks, KV_HEADS, BLOCK_SIZE, codec.slot_bytes)
    caches = [torch.randint(0, 0xF2, shape, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
    tables = [torch.randperm(blocks, device="cuda").to(torch.int32).view(requests, -1) for _ in range(LAYERS)]
    query = torch.randn(requests, QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    output = torch.empty_like(query)
    grouped = (requests, KV_HEADS, QUERY_HEADS // KV_HEADS, HEAD_DIM)
    rotated = torch.empty(grouped, dtype=torch.float16, device="cuda")
    partial = torch.empty(requests, QUERY_HEADS, splits, HEAD_DIM, device="cuda")
    stats = torch.empty(requests, QUERY_HEADS, splits, 2, device="cuda")
    start = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    seq_lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    forward = rotation_matrix(codec.key, KV_HEADS)
    backward = rotation_matrix(codec.value, KV_HEADS, inverse=True)

    def round_of_layers(rotates: bool) -> None:
        for cache, table in zip(caches, tables, strict=True):
            if rotates:
                rotate_query(query, forward, rotated, HEAD_DIM**-0.5)
            decode(
                page, rotated, cache, table, start, seq_lens, partial, stats, max_query_len=1, max_registers=registers
            )
            merge(partial, stats, backward, output.view(grouped))

    def microseconds(rotates: bool) -> list[float]:
        torch.cuda.synchronize()  # the benchmark runs on a stream of its own
        times = triton.testing.do_bench_cudagraph(lambda: round_of_layers(rotates), rep=100, quantiles=[0.2, 0.5, 0.8])
        return [milliseconds * 1e3 / LAYERS for milliseconds in times]

    return microseconds(True), microseconds(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=list(FORMATS), choices=FORMATS, metavar="DTYPE")
    parser.add_argument("--splits", nargs="+", type=int, help="split counts to try (default: what the backend takes)")
    parser.add_argument("--max-registers", type=int, default=decode_module.MAX_REGISTERS)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of this code, where there is no git")
    options = parser.parse_args()
    made_with = {**machine(with_vllm=False), "commit": options.commit or commit_here()}
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s")
    for name in options.dtypes:
        for requests, context in SHAPES:
            packed = requests * context * KV_HEADS * FORMATS[name].slot_bytes(HEAD_DIM)
            for splits in options.splits or [decode_module.split_count(requests * KV_HEADS, multiprocessors)]:
                (p20, p50, p80), attention = time_layer(name, requests, context, splits, options.max_registers)
                share = packed / (attention[1] * 1e-6) / bandwidth
                case = f"{name:13} {requests:4} x {context:5}  {splits:3} splits"
                print(f"{case}  {p50:7.1f} us, attention and merge {attention[1]:7.1f} us, {share:5.1%}", flush=True)
                row: dict[str, object] = {
                    "dtype": name, "requests": requests, "context": context, "splits": splits,
                    "p20_us": f"{p20:.1f}", "p50_us": f"{p50:.1f}", "p80_us": f"{p80:.1f}",
                    "attention_p50_us": f"{attention[1]:.1f}", "bandwidth": f"{share:.3f}",
                }  # fmt: skip
                if options.csv:
                    append(options.csv, {**row, **made_with})


if __name__ == "__main__":
    sys.exit(main())
