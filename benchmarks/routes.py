"""Where the routes meet: attention of a few new tokens a request, by the decode kernel and by gather + FlashAttention.

    python benchmarks/routes.py [--csv FILE]

Times are of one layer (32 query heads, 8 KV heads, head_dim 128, isoquant4), rotation and merge included, with L2
flushed before each run. `attention/routes.py` takes its threshold from here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from packed_kv.attention.choice import Limits
from packed_kv.attention.decode import PairLayout, pair_kernel
from packed_kv.attention.metadata import Batch
from packed_kv.attention.prefill import FlashPrefill, find_flash_attention
from packed_kv.attention.protocols import DecodeBatch
from packed_kv.attention.step import StepCache
from packed_kv.attention.triton_store import TritonPairStore
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.reference.attention import AttentionOptions
from rows import append, commit_here, machine
from vllm.v1.worker.workspace import init_workspace_manager

QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16


def measure(requests: int, context: int, query_tokens: int) -> tuple[float, float]:
    """Microseconds of both routes for a batch of requests that have `context` tokens, the last `query_tokens` new."""
    device = torch.device("cuda")
    codec = PagedCodec(FORMATS["isoquant4"], HEAD_DIM, device=device)
    options = AttentionOptions(scale=HEAD_DIM**-0.5)
    blocks = requests * context // BLOCK_SIZE
    shape = (blocks, KV_HEADS, BLOCK_SIZE, codec.slot_bytes)
    cache = torch.randint(0, 0x40, shape, dtype=torch.uint8, device=device)
    table = torch.randperm(blocks, device=device).to(torch.int32).view(requests, -1)
    tokens = requests * query_tokens
    starts = list(range(0, tokens + 1, query_tokens))
    metadata: Any = SimpleNamespace(
        query_starts=starts, num_actual_tokens=tokens, context=[context] * requests, block_table=table,
        steps=StepCache(),
    )  # fmt: skip
    query = torch.randn(tokens, QUERY_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    key, value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    output = torch.empty_like(query)
    query_start = torch.tensor(starts, dtype=torch.int32, device=device)
    seq_lens = torch.full((requests,), context, dtype=torch.int32, device=device)
    layout = PairLayout(codec, QUERY_HEADS, KV_HEADS, options, Limits(query_tokens, requests))
    rotation = layout.rotation()
    decode, store = pair_kernel(layout, rotation, "auto"), TritonPairStore(codec, KV_HEADS, rotation)
    positions = (context - query_tokens + torch.arange(query_tokens, device=device)).repeat(requests)
    step = decode.prepare(DecodeBatch(table, query_start, seq_lens, tokens, query_tokens, positions))
    flash_attention = find_flash_attention(HEAD_DIM, HEAD_DIM, query.dtype, None)
    prefill = FlashPrefill(codec, QUERY_HEADS, KV_HEADS, options, tokens, requests, flash_attention)

    def microseconds(attend: Callable[[], None]) -> float:
        return 1e3 * triton.testing.do_bench(attend, warmup=20, rep=100, return_mode="median")

    def attend_by_decode_kernel() -> None:
        store.rotate(query, step)
        decode.attend(step, cache, (query,), None, output)

    return (
        microseconds(attend_by_decode_kernel),
        microseconds(lambda: prefill.attend(Batch(query, key, value, cache, metadata, output), 0)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["32x8192", "8x32768", "1x32768", "32x1024"])
    parser.add_argument("--query-tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--commit", help="of this code, where there is no git")
    options = parser.parse_args()
    init_workspace_manager(torch.device("cuda"))
    environment = {**machine(), "commit": options.commit or commit_here()}
    for shape in options.shapes:
        requests, context = map(int, shape.split("x"))
        for query_tokens in options.query_tokens:
            decode, prefill = measure(requests, context, query_tokens)
            print(
                f"{shape:>10} {query_tokens:3} new tokens: decode {decode:8.1f} us, prefill {prefill:8.1f} us",
                flush=True,
            )
            if options.csv:
                row = {"requests": requests, "context": context, "query_tokens": query_tokens,
                       "decode_us": f"{decode:.1f}", "prefill_us": f"{prefill:.1f}"}  # fmt: skip
                append(options.csv, {**row, **environment})
    return 0


if __name__ == "__main__":
    sys.exit(main())
