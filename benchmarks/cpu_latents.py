"""Time of decode attention over latents of one layer on a CPU, beside vLLM's own op in bf16.

    python benchmarks/cpu_latents.py [--dtypes NAME ...] [--shapes R,N,H ...] [--threads N] [--csv FILE]

Shapes are requests, tokens of each, query heads; latents have 512 channels, 64 of RoPE. Both sides, and the PyTorch
route, take turns as in cpu.py. No time is printed of a kernel that is not within 3e-4 of the reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from cpu import BOUND, alternate, choose_op
from packed_kv.codecs.latent import LatentCodec
from packed_kv.formats import FORMATS
from packed_kv.kernels.cpu.compiler import best_target, processor
from packed_kv.kernels.cpu.latent import CpuLatentPages
from packed_kv.kernels.cpu.latent_decode import CpuLatentDecode
from packed_kv.reference.latent_attention import attend
from rows import append, commit_here, machine

RANK, ROPE, BLOCK_SIZE, VLLM_BLOCK_SIZE = 512, 64, 128, 16
SCALE = 0.07
SHAPES = ("1,4096,16", "8,1024,16", "1,4096,32", "1,4096,128", "8,1024,128")
"""DeepSeek-V2-Lite's heads, twice as many, and DeepSeek-V3's."""


class Shape(NamedTuple):
    requests: int
    tokens: int
    heads: int


class Layer:
    """Tokens of a layer's requests in blocks of `block_size` out of order, and queries of the newest."""

    def __init__(self, shape: Shape, block_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(shape.requests, shape.heads, RANK + ROPE, generator=generator)
        self.query, blocks = query.bfloat16(), -(-shape.tokens // block_size)
        table = torch.randperm(shape.requests * blocks, generator=generator).to(torch.int32)
        self.table = table.view(shape.requests, blocks)
        position = torch.arange(shape.tokens)
        self.slots = (self.table.long()[:, position // block_size] * block_size + position % block_size).flatten()
        self.rows = torch.randn(len(self.slots), RANK + ROPE, generator=generator).bfloat16()
        self.lengths = torch.full((shape.requests,), shape.tokens, dtype=torch.int32)
        self.starts = torch.arange(shape.requests + 1, dtype=torch.int32)


def packed_latents(name: str, shape: Shape) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return attention over pages of a dtype by the kernels, and in PyTorch."""
    layer, codec = Layer(shape, BLOCK_SIZE), LatentCodec(FORMATS[name], RANK, ROPE)
    pages = CpuLatentPages(codec)
    cache = torch.zeros(layer.table.numel(), BLOCK_SIZE, codec.slot_bytes, dtype=torch.uint8)
    pages.store(cache, layer.slots, *layer.rows.split([RANK, ROPE], dim=-1))
    batch = cache, layer.table, layer.starts, layer.lengths, *layer.query.split([RANK, ROPE], dim=-1), SCALE
    kernel, found = CpuLatentDecode(codec, SCALE), torch.empty(shape.requests, shape.heads, RANK)
    kernel(*batch[:-1], found)
    wanted = attend(codec, *batch, None)
    error = ((found - wanted).square().mean() / wanted.square().mean()).sqrt().item()
    if error > BOUND:
        raise ValueError(f"{name}: the kernels' error is {error:.1e}, above {BOUND}")
    output = found.bfloat16()
    return lambda: kernel(*batch[:-1], output), lambda: attend(codec, *batch, None)


def vllm_latents(shape: Shape) -> Callable[[], None]:
    """Return the same by vLLM's op over a cache in bf16."""
    from vllm import _custom_ops as ops

    layer = Layer(shape, VLLM_BLOCK_SIZE)
    cache = torch.zeros(layer.table.numel(), VLLM_BLOCK_SIZE, RANK + ROPE, dtype=torch.bfloat16)
    cache.view(-1, RANK + ROPE)[layer.slots] = layer.rows
    output = layer.query.new_empty(shape.requests, shape.heads, RANK)
    return lambda: ops.mla_decode_kvcache_cpu(output, layer.query, cache, SCALE, layer.table, layer.lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=FORMATS, default=["tq4", "turboquant25"], metavar="NAME")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="R,N,H")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    choose_op("avx512")
    for text in arguments.shapes:
        shape = Shape(*map(int, text.split(",")))
        for name in arguments.dtypes:
            packed, pytorch = packed_latents(name, shape)
            sides = {"auto": vllm_latents(shape), "packed": packed, "pytorch": pytorch}
            times = {side: seconds[0] for side, seconds in alternate(sides, arguments.repetitions).items()}
            row: dict[str, object] = {"dtype": name, **shape._asdict(), "threads": arguments.threads}
            row |= {"target": best_target().name} | {f"{side}_ms": f"{s * 1e3:.2f}" for side, s in times.items()}
            row["ratio"] = f"{times['packed'] / times['auto']:.2f}"
            row["ratio_to_pytorch"] = f"{times['packed'] / times['pytorch']:.2f}"
            print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if arguments.csv:
                append(arguments.csv, row | {"processor": processor()[0], **machine(), "commit": commit_here()})


if __name__ == "__main__":
    main()
