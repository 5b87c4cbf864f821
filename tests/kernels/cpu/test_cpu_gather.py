"""The gather of the CPU reads what the reference reads, out of pages and ring."""

from __future__ import annotations

import pytest
import torch
from cpu_layers import cases, codec_of, pages, ring, vectors
from packed_kv.codecs.pages import PagedCodec
from packed_kv.codecs.ring import Ring, read
from packed_kv.codecs.ring import write as write_ring
from packed_kv.kernels.cpu.compiler import Target
from packed_kv.kernels.cpu.gather import CpuGather

HEADS, BLOCK, TOKENS = 2, 32, 75


class Request:
    """A request of `TOKENS` tokens in blocks out of order; pages of other tokens hold random bytes. Those from 50 on
    are in a ring, too."""

    def __init__(self, codec: PagedCodec) -> None:
        self.codec = codec
        head_dim, value_dim = codec.key.head_dim, codec.value.head_dim
        self.table = torch.tensor([4, 0, 2, 9], dtype=torch.int32)  # the last one is beyond the request, and not there
        self.cache = pages(codec.key.fmt.name, 5, HEADS, BLOCK, head_dim)
        self.positions = torch.arange(TOKENS)
        key, value = vectors(TOKENS, HEADS, head_dim, value_dim, torch.float32)
        codec.write(self.cache, self.slots(self.table, BLOCK, self.positions), key, value, self.positions)
        ring_table = torch.tensor([[-1] * 12 + [3, 5, 2, 8, 1, 7, 4]], dtype=torch.int32)
        self.ring = Ring(ring(9, HEADS, 4, head_dim), ring_table, torch.tensor([50], dtype=torch.int32), 64)
        self.ring_slots = self.slots(ring_table[0], 4, self.positions[50:])
        write_ring(self.ring.cache, self.ring_slots, *codec.prepare(key[50:], value[50:], self.positions[50:]))

    @staticmethod
    def slots(table: torch.Tensor, block_size: int, positions: torch.Tensor) -> torch.Tensor:
        return table[positions // block_size].long() * block_size + positions % block_size

    def expected(self, ring_from: int) -> list[torch.Tensor]:
        """K and V by the reference, fp32 [tokens, KV heads, channels]."""
        micro_blocks = self.slots(self.table, BLOCK, torch.arange(0, TOKENS, 16)) // 16
        stored = [x[:, :TOKENS].transpose(0, 1).clone() for x in self.codec.read(self.cache, micro_blocks)]
        for whole, recent in zip(stored, read(self.ring.cache, self.ring_slots), strict=True):
            whole[ring_from:] = recent[ring_from - 50 :]
        place = self.positions.unsqueeze(1)
        return [codec.restore(x, place) for codec, x in zip(self.codec.codecs, stored, strict=True)]


@pytest.mark.parametrize(("name", "shape", "target"), cases())
def test_equals_the_reference(name: str, shape: tuple[int, int], target: Target) -> None:
    for calibrated in (False, True):
        request = Request(codec_of(name, *shape, HEADS, calibrated=calibrated))
        gather = CpuGather(request.codec, target=target)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for ring_from, first, end in ((TOKENS, 0, TOKENS), (61, 0, TOKENS), (50, 32, 64), (50, 48, 49)):
                found = [torch.full((end - first, HEADS, dim), torch.nan, dtype=dtype) for dim in shape]
                with_ring = {} if ring_from == TOKENS else {"ring": request.ring, "ring_from": ring_from}
                gather(request.cache, request.table, first, end, *found, **with_ring)
                for ours, theirs in zip(found, request.expected(ring_from), strict=True):
                    assert torch.equal(ours, theirs[first:end].to(dtype)), (calibrated, dtype, ring_from)


@pytest.mark.parametrize("threads", [2, 4])
def test_threads(threads: int) -> None:
    request = Request(codec_of("turboquant35", 128, 128, HEADS, calibrated=False))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        key, value = (torch.full((TOKENS, HEADS, 128), torch.nan) for _ in range(2))
        CpuGather(request.codec)(request.cache, request.table, 0, TOKENS, key, value)
    finally:
        torch.set_num_threads(before)
    for ours, theirs in zip((key, value), request.expected(TOKENS), strict=True):
        assert torch.equal(ours, theirs)
