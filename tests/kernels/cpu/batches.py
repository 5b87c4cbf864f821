"""Batches of packed pages for the CPU kernels, and the reference's attention over them."""

from __future__ import annotations

from typing import Any

import torch
from packed_kv import FORMATS
from packed_kv.codecs import ring as ring_codec
from packed_kv.codecs.ring import Ring
from packed_kv.kernels.cpu.compiler import Target
from packed_kv.kernels.cpu.decode import CpuDecode
from packed_kv.layout import ring_slot_bytes
from packed_kv.reference.attention import AttentionOptions, RecentVectors, attend
from page_codecs import page_codec

POISON = 0xFF


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_rms(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    return ((got - wanted).square().mean() / wanted.square().mean()).sqrt().item()


class Batch:
    """Requests of some tokens, the newest of which are queries, in shuffled blocks of a cache that is 0xFF elsewhere.

    Args:
        name: of the dtype.
        lengths: of each request its tokens, or (tokens, query tokens).
        head_dim, heads: of K; (query heads, KV heads).
        window: tokens that a query reads in the ring; 0: there is no ring.
        codec: more arguments of `PagedCodec`.
    """

    def __init__(
        self,
        name: str,
        lengths: list[int | tuple[int, int]],
        head_dim: int = 64,
        heads: tuple[int, int] = (6, 2),
        block_size: int = 32,
        window: int = 0,
        key_offset: float = 0.0,
        **codec: Any,
    ) -> None:
        self.codec = page_codec(FORMATS[name], head_dim, **codec)
        self.query_heads, self.kv_heads = heads
        pairs = [(length, 1) if isinstance(length, int) else length for length in lengths]
        self.lengths, self.query_lens = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        blocks = [-(-length // block_size) for length in self.lengths]
        order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(5)).to(torch.int32)
        shape = (len(order), self.kv_heads, block_size, self.codec.slot_bytes)
        self.cache = torch.full(shape, POISON, dtype=torch.uint8)
        self.table = torch.full((len(pairs), max(blocks)), len(order) - 1, dtype=torch.int32)
        self.ring = self._empty_ring(window) if window else None
        self.recent: list[RecentVectors | None] = [None] * len(pairs)
        for r, (length, own) in enumerate(pairs):
            self.table[r, : blocks[r]], order = order[: blocks[r]], order[blocks[r] :]
            self._store(r, length, own, key_offset)
        self.query = gaussian(sum(self.query_lens), self.query_heads, head_dim, seed=2)
        starts = torch.tensor([0, *self.query_lens]).cumsum(0)
        self.query_start, self.seq_lens = starts.to(torch.int32), torch.tensor(self.lengths, dtype=torch.int32)

    def _empty_ring(self, window: int) -> Ring:
        """Ring blocks of 4 tokens, enough for the window and the query tokens of each request."""
        tokens = [min(length, window + own) for length, own in zip(self.lengths, self.query_lens, strict=True)]
        blocks = sum(-(-count // 4) + 2 for count in tokens)
        slot = ring_slot_bytes(self.codec.key.head_dim)
        cache = torch.full((blocks, self.kv_heads, 4, slot), POISON, dtype=torch.uint8)
        first = torch.tensor([n - count for n, count in zip(self.lengths, tokens, strict=True)], dtype=torch.int32)
        table = torch.full((len(tokens), -(-max(self.lengths) // 4) + 1), blocks - 1, dtype=torch.int32)
        at = 0
        for r, length in enumerate(self.lengths):
            for block in range(int(first[r]) // 4, (length - 1) // 4 + 1):
                table[r, block], at = at, at + 1
        return Ring(cache, table, first, window)

    def _store(self, r: int, length: int, own: int, key_offset: float) -> None:
        key = gaussian(length, self.kv_heads, self.codec.key.head_dim, seed=10 + r) + key_offset
        value = gaussian(length, self.kv_heads, self.codec.value.head_dim, seed=20 + r)
        positions = torch.arange(length)
        size = self.cache.shape[2]
        slots = self.table[r, positions // size].long() * size + positions % size
        self.codec.write(self.cache, slots, key, value, positions)
        if self.ring is None:
            return
        first = int(self.ring.first[r])
        recent = positions[first:]
        slots = self.ring.block_table[r, recent // 4].long() * 4 + recent % 4
        ring_codec.write(self.ring.cache, slots, *self.codec.prepare(key[recent], value[recent], recent))
        held = (x.transpose(0, 1) for x in ring_codec.read(self.ring.cache, slots))
        self.recent[r] = RecentVectors(first, self.ring.window, *self.codec.whole(*held, recent))

    def decode(
        self, options: AttentionOptions, target: Target | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Output in fp32 by the kernel, of queries and outputs of a dtype."""
        kernel = CpuDecode(self.codec, self.query_heads, self.kv_heads, options, target=target)
        tokens = len(self.query)
        output = torch.full((tokens, self.query_heads, self.codec.value.head_dim), torch.nan, dtype=dtype)
        where = (self.cache, self.table, self.query_start, self.seq_lens)
        kernel.bind(self.query.to(dtype), *where, output, self.ring)()
        return output.float()

    def reference(self, options: AttentionOptions, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The same by `attend`."""
        rows = zip(self.table, self.lengths, self.query.to(dtype).split(self.query_lens), self.recent, strict=True)
        results = [
            attend(self.codec, self.cache, table, length, query, options, recent)[0]
            for table, length, query, recent in rows
            if len(query)
        ]
        return torch.cat(results)
