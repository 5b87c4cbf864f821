"""Time of decode attention over latents of one layer on a CPU, beside vLLM's own op in bf16.

    python benchmarks/cpu_latents.py [--dtypes NAME ...] [--shapes R,N,H ...] [--threads N] [--csv FILE]

Shapes are requests, tokens of each, query heads; latents have 512 channels, 64 of RoPE. Both sides, and the PyTorch
route, take turns as in cpu.py. vLLM's op is that of the backend that it chooses for this processor. No time is printed
of a kernel that is not within 3e-4 of the reference, or of an op that is not within 1e-2, as bf16 is, of attention.
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
SCALE, OP_BOUND = 0.07, 1e-2
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


def vllm_latents(shape: Shape) -> tuple[str, Callable[[], torch.Tensor]]:
    """Return the name of the backend that vLLM chooses here, and the same by its op over a cache in bf16."""
    layer, has_amx = Layer(shape, VLLM_BLOCK_SIZE), torch.cpu._is_amx_tile_supported()
    cache = torch.zeros(layer.table.numel() * VLLM_BLOCK_SIZE, RANK + ROPE, dtype=torch.bfloat16)
    cache[layer.slots] = layer.rows
    op = _amx_op(layer, cache) if has_amx else _plain_op(layer, cache)
    keys, queries = layer.rows[: shape.tokens].float(), layer.query[0].float()
    wanted = torch.softmax(queries @ keys.T * SCALE, dim=-1) @ keys[:, :RANK]
    error = ((op()[0] - wanted).square().mean() / wanted.square().mean()).sqrt().item()
    if error > OP_BOUND:
        raise ValueError(f"the error of vLLM's op is {error:.1e}, above {OP_BOUND}")
    return "AMX_MLA" if has_amx else "CPU_MLA", op


def _plain_op(layer: Layer, cache: torch.Tensor) -> Callable[[], torch.Tensor]:
    from vllm import _custom_ops as ops

    output, pages = layer.query.new_empty(*layer.query.shape[:2], RANK), cache.view(-1, VLLM_BLOCK_SIZE, RANK + ROPE)

    def run() -> torch.Tensor:
        ops.mla_decode_kvcache_cpu(output, layer.query, pages, SCALE, layer.table, layer.lengths)
        return output

    return run


def _amx_op(layer: Layer, cache: torch.Tensor) -> Callable[[], torch.Tensor]:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.mla import amx_mla

    torch.cpu._init_amx()
    requests, heads, _ = layer.query.shape
    rows = amx_mla._expand_block_table(layer.table, VLLM_BLOCK_SIZE)
    splits = amx_mla._compute_num_kv_splits(int(layer.lengths.max()), torch.get_num_threads())
    keys, pool, lengths = cache.unsqueeze(1), torch.arange(requests), layer.lengths.long()

    def run() -> torch.Tensor:  # what AMXMLAImpl.forward_mqa does
        output = layer.query.new_zeros(requests, heads, RANK)
        sums = torch.zeros(requests, heads, splits, RANK + 1)
        ops.cpu_mla_decode(
            layer.query, keys, keys[..., :RANK], output, None, None, None, sums, rows, pool, lengths, SCALE, 0.0, False,
            0, None, None,
        )  # fmt: skip
        return output

    return run


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
            backend, op = vllm_latents(shape)
            sides = {"auto": op, "packed": packed, "pytorch": pytorch}
            times = {side: seconds[0] for side, seconds in alternate(sides, arguments.repetitions).items()}
            row: dict[str, object] = {
                "dtype": name,
                **shape._asdict(),
                "threads": arguments.threads,
                "vllm_backend": backend,
            }
            row |= {"target": best_target().name} | {f"{side}_ms": f"{s * 1e3:.2f}" for side, s in times.items()}
            row["ratio"] = f"{times['packed'] / times['auto']:.2f}"
            row["ratio_to_pytorch"] = f"{times['packed'] / times['pytorch']:.2f}"
            print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if arguments.csv:
                append(arguments.csv, row | {"processor": processor()[0], **machine(), "commit": commit_here()})


if __name__ == "__main__":
    main()
