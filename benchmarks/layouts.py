"""Decode attention in vLLM's layouts LBHNC and BLHNC: whether it matters how far a layer's pages are apart.

    python benchmarks/layouts.py [DTYPE ...]

The same kernels read the same number of pages of 36 layers, of blocks anywhere in a pool of 64 GB, in turns. In LBHNC a
layer's pages lie together, in BLHNC those of a block.
"""

from __future__ import annotations

import sys

import kernels
import torch
from packed_kv.codecs.pages import PagedCodec
from packed_kv.formats import FORMATS
from packed_kv.layout import page_layout
from rows import machine

LAYERS, POOL_BYTES = 36, 64e9
LAYOUTS, KERNELS = ("LBHNC", "BLHNC"), ("cuda", "triton")


class Scattered(kernels.Layers):
    """As its base, with one table for all layers; `pages`: uint8 [blocks * LAYERS, KV heads, block_size, bytes]."""

    def __init__(self, name: str, pages: torch.Tensor, layout: str, table: torch.Tensor, context: int) -> None:
        shape = kernels.HEAD_DIM
        self.codec, self.page = PagedCodec(FORMATS[name], shape, device="cuda"), page_layout(FORMATS[name], shape)
        blocks, requests = len(pages) // LAYERS, len(table)
        regions = [slice(i * blocks, (i + 1) * blocks) if layout == "LBHNC" else slice(i, None, LAYERS)
                   for i in range(LAYERS)]  # fmt: skip
        self.caches, self.tables = [pages[region] for region in regions], [table] * LAYERS
        self.query = torch.randn(requests, kernels.QUERY_HEADS, shape, device="cuda", dtype=torch.bfloat16)
        self.output = torch.empty_like(self.query)
        self.start = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.full((requests,), context, dtype=torch.int32, device="cuda")
        self.rings = [None] * LAYERS


def random_pages(name: str) -> torch.Tensor:
    """A pool of random codes, and of scales as data has them."""
    slot_bytes, page = FORMATS[name].slot_bytes(kernels.HEAD_DIM), page_layout(FORMATS[name], kernels.HEAD_DIM)
    heads, block_size = kernels.KV_HEADS, kernels.BLOCK_SIZE
    blocks = int(POOL_BYTES) // (LAYERS * heads * block_size * slot_bytes)
    pages = torch.empty((blocks * LAYERS, heads, block_size, slot_bytes), dtype=torch.uint8, device="cuda")
    for part in pages.split(100_000):
        part.random_(0, 256)
        scales = part.view(len(part), heads, block_size // 16, -1)[..., page.plane(0, "scales").offset :]
        scales.copy_(torch.randint(0x64, 0x74, scales.shape, dtype=torch.uint8, device="cuda"))
    return pages


def main() -> None:
    kernels.LAYERS = LAYERS  # what `interleaved` divides by
    print(machine(with_vllm=False), flush=True)
    for name in sys.argv[1:] or ["tq4", "turboquant35"]:
        pages = random_pages(name)
        for requests, context in kernels.SHAPES:
            picked = torch.randperm(len(pages) // LAYERS, device="cuda")[: requests * context // kernels.BLOCK_SIZE]
            table = picked.to(torch.int32).view(requests, -1)
            rounds = {}
            for layout in LAYOUTS:
                layers = Scattered(name, pages, layout, table, context)
                for kernel in KERNELS:
                    found = layers.rounds(kernel, None, kernels.decode_module.MAX_REGISTERS)
                    rounds[f"{layout} {kernel}"] = found[kernel]
            times = kernels.interleaved(rounds)
            for kernel in KERNELS:
                of = {layout: times[f"{layout} {kernel}"] for layout in LAYOUTS}
                both = "  ".join(
                    f"{layout} {p50:7.1f} us ({p20:.1f}..{p80:.1f})" for layout, (p20, p50, p80) in of.items()
                )
                ratio = of["BLHNC"][1] / of["LBHNC"][1]
                print(f"{name:13} {requests:4} x {context:5} {kernel:6}  {both}  {ratio:.3f}", flush=True)
        del pages, layers, rounds


if __name__ == "__main__":
    main()
