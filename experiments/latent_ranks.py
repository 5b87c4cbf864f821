#!/usr/bin/env python3
"""Print what ranks that split the tokens of latents hold, and what they exchange: arithmetic, nothing is run.

    python experiments/latent_ranks.py [--ranks 8] [--memory 40]

Sizes are those of the public configs of DeepSeek V3 and Kimi K2. docs/parallel.md has the tables.
"""

from __future__ import annotations

import argparse

from packed_kv.formats import FORMATS

LAYERS, RANK, ROPE = 61, 512, 64
HEADS = {"DeepSeek V3": 128, "Kimi K2": 64}
DTYPES = ("bf16", "fp8", "tq4", "turboquant25")


def bytes_of(dtype: str) -> int:
    """Of a token in a layer."""
    if dtype in FORMATS:
        return FORMATS[dtype].latent_bytes(RANK, ROPE)
    return (RANK + ROPE) * {"bf16": 2, "fp8": 1}[dtype]


def exchanged(heads: int, ranks: int) -> tuple[int, int, int]:
    """Bytes that a rank receives of others in a layer for each query token: queries in 16 bits, lse and parts of
    outputs in 32."""
    of_others = heads * (ranks - 1)
    return 2 * of_others // ranks * (RANK + ROPE), 4 * of_others, 4 * of_others // ranks * RANK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="tensor-parallel ranks (default: %(default)s)")
    parser.add_argument("--memory", type=float, default=40, help="GiB of each rank for pages (default: %(default)s)")
    asked = parser.parse_args()
    print(f"| dtype | bytes a token and layer | KV tokens, DCP 1 | KV tokens, DCP {asked.ranks} |\n|---|---|---|---|")
    for dtype in DTYPES:
        tokens = int(asked.memory * 2**30 / (bytes_of(dtype) * LAYERS))
        print(f"| {dtype} | {bytes_of(dtype):,} | {tokens:,} | {tokens * asked.ranks:,} |")
    print("\n| a rank receives, bytes a layer and query token | queries | lse | outputs |\n|---|---|---|---|")
    for name, heads in HEADS.items():
        print(f"| {name} | " + " | ".join(f"{x:,}" for x in exchanged(heads, asked.ranks)) + " |")


if __name__ == "__main__":
    main()
