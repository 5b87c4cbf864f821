"""Vectors that the CPU packs and reads outside of pages are the codec's, bit by bit."""

from __future__ import annotations

import pytest
import torch
from cpu_layers import cases, codec_of
from packed_kv.codecs import ring
from packed_kv.codecs.pages import PagedCodec
from packed_kv.kernels.cpu.compiler import Target
from packed_kv.kernels.cpu.vectors import CpuVectors

HEADS = 3


def inputs(sequences: int, tokens: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """As a model has them: heads between tokens. With NaN, infinities, -0, vectors of zeros and large numbers."""
    x = torch.randn(sequences, tokens, HEADS, head_dim, generator=torch.Generator().manual_seed(2))
    flat = x.view(-1)
    for place, number in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 40000.0, -60000.0, 1e-7, 3e-5)):
        flat[place * 101 % len(flat)] = number
    x[:, tokens // 2] = 0
    x[:, tokens // 3, 0] *= 1e-6
    return x.to(dtype).transpose(1, 2)


def check(codec: PagedCodec, kernel: CpuVectors, sequences: int, tokens: int, recent: int, dtype: torch.dtype) -> None:
    """Some sequences begin behind padding, whose tokens have positions below 0."""
    starts = torch.arange(sequences)[:, None] * 517
    positions = torch.arange(tokens) - starts + 3 * (tokens == 1)
    for role, part in enumerate(codec.codecs):
        x = inputs(sequences, tokens, part.head_dim, dtype)
        packed, codes, scales = kernel.encode(role, x, positions, recent)
        wanted = part.encode(x.transpose(1, 2), positions.unsqueeze(-1)).transpose(1, 2)
        assert torch.equal(packed, wanted), "packed bytes"
        count = codes.shape[2]
        assert count == min(recent, tokens)
        rotated = part.prepare(x.transpose(1, 2), positions.unsqueeze(-1))[:, tokens - count :]
        for got, of_ring in zip((codes, scales), ring.quantize(rotated), strict=True):
            assert torch.equal(got, of_ring.transpose(1, 2)), "the newest at 8 bits"
        room = torch.full((sequences, HEADS, tokens + 5, packed.shape[3]), 255, dtype=torch.uint8)
        room[:, :, 2 : tokens + 2] = packed  # a cache has room at both ends
        held = room[:, :, 2 : tokens + 2]
        older = part.decode(held.transpose(1, 2), positions.unsqueeze(-1))
        newest = part.restore(ring.dequantize(codes, scales).transpose(1, 2), positions[:, tokens - count :, None])
        whole = torch.cat((older[:, : tokens - count], newest), dim=1).transpose(1, 2).to(dtype)
        assert torch.equal(kernel.decode(role, held, codes, scales, positions, dtype), whole), "what is read"


@pytest.mark.parametrize(("name", "shape", "target"), cases())
def test_vectors_equal_the_codecs(name: str, shape: tuple[int, int], target: Target) -> None:
    for calibrated in (False, True):
        codec = codec_of(name, *shape, HEADS, calibrated=calibrated)
        kernel = CpuVectors(codec, target=target)
        check(codec, kernel, 2, 1, 64, torch.bfloat16)
        check(codec, kernel, 3, 37, 0 if calibrated else 20, torch.float32)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_tokens_in_any_dtype_and_number_of_threads(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        codec = codec_of("turboquant35", 64, 64, HEADS, calibrated=True)
        check(codec, CpuVectors(codec), 2, 1100, 64, dtype)
    finally:
        torch.set_num_threads(before)


def test_a_table_of_means_that_grows_is_read_where_it_is() -> None:
    codec = codec_of("tq4", 64, 64, HEADS, calibrated=True)
    transform = codec.key.transform
    transform.grows = True
    kernel, before = CpuVectors(codec), transform.mean_blocks
    positions = torch.tensor([[5000 * 512]])
    x = inputs(1, 1, 64, torch.float32)
    packed, *_ = kernel.encode(0, x, positions, 0)
    assert transform.mean_blocks > before
    assert torch.equal(packed.transpose(1, 2), codec.key.encode(x.transpose(1, 2), positions.unsqueeze(-1)))
