"""Time of the store kernel: K and V of new tokens of one layer, 8 KV heads of 128 channels, bf16.

    python benchmarks/store.py [--dtypes NAME ...] [--csv FILE]

128 tokens lie in a block each, as in decode; 8,192 tokens fill whole blocks, as in prefill. Every replay stores the
same tokens in the same slots, so the L2 may serve them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import triton
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.triton.store import store_tokens
from rows import append, commit_here, machine

KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 8, 128, 16, 16384
DECODE_TOKENS, PREFILL_TOKENS = 128, 8192


def time_store(name: str, tokens: int) -> list[float]:
    """p20, p50 and p80 in microseconds."""
    codec = PagedCodec(FORMATS[name], HEAD_DIM, device="cuda")
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK_SIZE, codec.slot_bytes, dtype=torch.uint8, device="cuda")
    blocks = torch.randperm(BLOCKS, device="cuda")
    if tokens == DECODE_TOKENS:
        slots = blocks[:tokens] * BLOCK_SIZE + torch.randint(0, BLOCK_SIZE, (tokens,), device="cuda")
    else:
        whole = blocks[: tokens // BLOCK_SIZE, None] * BLOCK_SIZE
        slots = (whole + torch.arange(BLOCK_SIZE, device="cuda")).flatten()
    key, value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    store_tokens(codec, cache, slots, key, value)
    torch.cuda.synchronize()  # the benchmark runs on a stream of its own
    times = triton.testing.do_bench_cudagraph(
        lambda: store_tokens(codec, cache, slots, key, value), rep=100, quantiles=[0.2, 0.5, 0.8]
    )
    return [milliseconds * 1e3 for milliseconds in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=list(FORMATS), choices=FORMATS, metavar="DTYPE")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of this code, where there is no git")
    options = parser.parse_args()
    made_with = {**machine(with_vllm=False), "commit": options.commit or commit_here()}
    for name in options.dtypes:
        for tokens in (DECODE_TOKENS, PREFILL_TOKENS):
            times = [f"{time:.2f}" for time in time_store(name, tokens)]
            print(f"{name:13} {tokens:5} tokens  {times[1]} us", flush=True)
            row = {"dtype": name, "tokens": tokens, **dict(zip(("p20_us", "p50_us", "p80_us"), times, strict=True))}
            if options.csv:
                append(options.csv, {**row, **made_with})


if __name__ == "__main__":
    main()
