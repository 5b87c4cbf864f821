"""Time of the store kernel in one layer of 8 KV heads of 128 channels, in bf16.

    python benchmarks/store.py [--dtypes NAME ...] [--parts PART ...] [--tokens N ...] [--key-bits BITS ...]
        [--csv FILE]

Parts: `pages` is K and V of new tokens, as in prefills; `step` is these, the same tokens in the ring buffers and the
queries of 4 heads a KV head, as in a step of decodes; `queries` is those alone, and `stored` a step without them, each
by the kernel of the step. Up to 32 tokens lie in a block each, as in decodes; up to 512 are 8 neighbours, as in verify
steps; more fill whole blocks. Every replay stores the same tokens in the same slots, so the L2 may serve them. With
--key-bits the same is timed with groups of K of these bits, too.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from packed_kv.channel_calibration import ChannelCalibration
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.triton.rotate import QueryRotation, RotateQueryLaunch, rotation_matrix
from packed_kv.kernels.triton.store import StoreLaunch
from packed_kv.layout import ring_slot_bytes
from rows import append, commit_here, machine

KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, BLOCKS, RING_BLOCK = 8, 4, 128, 16, 16384, 8
PARTS = ("pages", "step", "stored", "queries")
TOKENS = (8, 32, 64, 128, 256, 512, 8192)
MOST_OF_A_STEP = 512


def some_slots(tokens: int) -> torch.Tensor:
    neighbours = 1 if tokens <= 32 else 8 if tokens <= MOST_OF_A_STEP else BLOCK_SIZE
    first = torch.randperm(BLOCKS, device="cuda")[: tokens // neighbours, None] * BLOCK_SIZE
    return (first + torch.arange(neighbours, device="cuda")).flatten()


def launches(name: str, tokens: int, key_bits: tuple[int, ...] | None) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the launches to be timed, by part."""
    codec = PagedCodec(FORMATS[name], HEAD_DIM, ChannelCalibration(group_bits=key_bits), device="cuda")
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, codec.slot_bytes, dtype=torch.uint8, device="cuda")
    key, value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    slots = some_slots(tokens)
    alone = StoreLaunch(codec, cache, key, value)
    grid, arguments = StoreLaunch.step(codec, KV_HEADS, slots)
    yield "pages", lambda: alone(grid, (key, value, key), arguments)
    if tokens > MOST_OF_A_STEP:
        return
    ring = torch.zeros(
        tokens, KV_HEADS, RING_BLOCK, ring_slot_bytes(HEAD_DIM), dtype=torch.uint8, device="cuda"
    )  # fmt: skip
    ring_slots = (torch.randperm(tokens, device="cuda") * RING_BLOCK).to(torch.int32)
    query = torch.randn(tokens, GROUP * KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    rotated = torch.empty(tokens, KV_HEADS, GROUP, HEAD_DIM, dtype=torch.float16, device="cuda")
    rotation = QueryRotation(rotation_matrix(codec.key, KV_HEADS), HEAD_DIM**-0.5)
    step = StoreLaunch(codec, cache, key, value, ring, (query, rotation))
    for part, stored, turned in (("step", tokens, tokens), ("stored", tokens, 0), ("queries", 0, tokens)):
        rotate = RotateQueryLaunch.step(rotated[:turned], rotation)
        own_grid, own_arguments = StoreLaunch.step(codec, KV_HEADS, slots[:stored], None, ring_slots[:stored], rotate)
        yield part, lambda given=own_arguments, programs=own_grid: step(programs, (key, value, query), given)


def microseconds(launch: Callable[[], None]) -> list[float]:
    """p20, p50 and p80."""
    launch()
    torch.cuda.synchronize()  # the benchmark runs on a stream of its own
    times = triton.testing.do_bench_cudagraph(launch, rep=10, quantiles=[0.2, 0.5, 0.8])
    return [milliseconds * 1e3 for milliseconds in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=list(FORMATS), choices=FORMATS, metavar="DTYPE")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N")
    parser.add_argument("--key-bits", type=int, nargs="+", help="of K's groups, beside the dtype's (default: none)")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of this code, where there is no git")
    options = parser.parse_args()
    made_with = {**machine(with_vllm=False), "commit": options.commit or commit_here()}
    widths = (None, tuple(options.key_bits)) if options.key_bits else (None,)
    for name, tokens in itertools.product(options.dtypes, options.tokens):
        for bits in widths:
            for part, launch in launches(name, tokens, bits):
                if part not in options.parts:
                    continue
                times = [f"{time:.2f}" for time in microseconds(launch)]
                print(f"{name:13} {part:8} {tokens:5} tokens  {times[1]} us {bits or ''}", flush=True)
                row = {
                    "dtype": name, "part": part, "tokens": tokens, "key_bits": " ".join(map(str, bits or ())),
                    **dict(zip(("p20_us", "p50_us", "p80_us"), times, strict=True)),
                }  # fmt: skip
                if options.csv:
                    append(options.csv, {**row, **made_with})


if __name__ == "__main__":
    main()
