"""Latents on a CPU: their store, by `store.cpp`, and attention of decodes over what `gather.cpp` reads of the pages.

The gather writes stored latents with their RoPE channels as fp32 rows, a piece of `PIECE` tokens at a time, and two
matrix products of PyTorch make scores and sums of a piece. docs/kernels.md says what each takes.
"""

from __future__ import annotations

import ctypes

import torch

from ...codecs.latent import LatentCodec
from ...codecs.ring import Ring
from ...layout import MICRO_BLOCK
from .compiler import Target
from .gather import Gather
from .gather import load as load_gather
from .store import Store
from .store import load as load_store
from .tables import ELEMENT_TYPES, LATENT_CHANNELS, Cache, latent_layer_of

PIECE = 1024
"""Tokens of a piece: 2.4 MB of rows at 512 + 64 channels. Of 256 to 4096 it is the fastest, by up to 12 %."""


def load(target: Target | None = None) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Return the libraries of store and gather, compiled once for all formats. Raises BuildError."""
    return load_store(target, LATENT_CHANNELS), load_gather(target, LATENT_CHANNELS)


class CpuLatentPages:
    """Stores, reads and attends to one layer's latents.

    Args:
        codec: of the layer, on the CPU.
        target: None: the best of this processor.

    Raises:
        BuildError: a source cannot be compiled.
        ValueError: the codec is not served: see `tables.latent_refusal`.
    """

    def __init__(self, codec: LatentCodec, *, target: Target | None = None) -> None:
        self.codec, self.layer = codec, latent_layer_of(codec)
        store, gather = load(target)
        self._store, self._gather = store.pk_store, gather.pk_gather
        self._store.argtypes, self._gather.argtypes = [ctypes.POINTER(Store)], [ctypes.POINTER(Gather)]
        self._gather.restype = None
        self.gain = codec.value_gain()
        self._rows = torch.empty(0, codec.rank + codec.rope_dim)

    def store(
        self,
        cache: torch.Tensor | None,
        slots: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        ring: torch.Tensor | None = None,
        ring_slots: torch.Tensor | None = None,
    ) -> None:
        """Store tokens; the bytes equal those of `LatentCodec.write` and `.write_ring`.

        Args:
            cache: uint8 [blocks, block_size, slot_bytes]; None: only the ring is written.
            slots: int64 [tokens], distinct; negative ones are skipped. Without those, the tokens of one micro-block
                must follow one another.
            latent, rope: fp32, bf16 or fp16 [tokens or more, rank] and [tokens or more, rope_dim], a token's channels
                contiguous.
            ring: uint8 [blocks, 1, block_size, ring_slot_bytes]; None: only pages are written.
            ring_slots: int [up to tokens], of the first tokens; negative ones are skipped.
        """
        slots = slots.to(torch.int64).contiguous()
        assert latent.dtype == rope.dtype and latent.stride(1) == rope.stride(1) == 1, (latent.dtype, rope.dtype)
        assert (latent.shape[1], rope.shape[1]) == tuple(self.layer.dim), (latent.shape, rope.shape)
        assert min(len(latent), len(rope)) >= len(slots), (latent.shape, rope.shape, slots.shape)
        call = Store(
            layer=ctypes.pointer(self.layer), pages=Cache.of(None if cache is None else cache.unsqueeze(1)),
            slots=slots.data_ptr(), tokens=len(slots), kv_heads=1, dtype=ELEMENT_TYPES[latent.dtype],
            threads=torch.get_num_threads(),
        )  # fmt: skip
        if ring is not None and ring_slots is not None:
            ring_slots = ring_slots.to(torch.int32).contiguous()
            assert len(ring_slots) <= len(slots), (ring_slots.shape, slots.shape)
            call.ring, call.ring_slots, call.ring_tokens = Cache.of(ring), ring_slots.data_ptr(), len(ring_slots)
        for role, vectors in enumerate((latent, rope)):
            call.vectors[role], call.token_stride[role] = vectors.data_ptr(), vectors.stride(0)
        if self._store(call):
            raise MemoryError(f"no memory to store {len(slots)} tokens")

    def read(
        self, cache: torch.Tensor, blocks: torch.Tensor, first: int, rows: torch.Tensor, ring: Cache | None = None,
        ring_blocks: torch.Tensor | None = None, ring_from: int = 0,
    ) -> None:  # fmt: skip
        """Fill rows with stored latents and RoPE channels of a request, as `LatentCodec.read` has them.

        Args:
            cache: uint8 [blocks, block_size, slot_bytes].
            blocks: int32 [blocks], the request's row of the block table.
            first: the token of the first row, a multiple of 16.
            rows: fp32, bf16 or fp16 [tokens, rank + rope_dim], the last dimension contiguous.
            ring, ring_blocks, ring_from: tokens from `ring_from` on are read in this ring, as `LatentCodec.read_ring`
                has them, by the request's row of its block table, int32. None: all are read in the pages.
        """
        assert first % MICRO_BLOCK == 0 and blocks.dtype == torch.int32 and blocks.stride(0) == 1, (first, blocks.dtype)
        assert rows.stride(1) == 1 and rows.shape[1] == sum(self.layer.dim), (rows.stride(), rows.shape)
        call = Gather(
            layer=ctypes.pointer(self.layer), pages=Cache.of(cache.unsqueeze(1)), block_table=blocks.data_ptr(),
            first=first, end=first + len(rows), kv_heads=1, dtype=ELEMENT_TYPES[rows.dtype],
            threads=torch.get_num_threads(),
        )  # fmt: skip
        if ring is not None and ring_blocks is not None:
            assert ring_blocks.dtype == torch.int32 and ring_blocks.stride(0) == 1, ring_blocks.dtype
            call.ring, call.ring_table, call.ring_from = ring, ring_blocks.data_ptr(), ring_from
        call.vectors[0], call.token_stride[0] = rows.data_ptr(), rows.stride(0)
        self._gather(call)

    def attend(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        scale: float,
        ring: Ring | None = None,
        page_lens: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of requests' last tokens over all of their cached ones, themselves included.

        Args:
            cache, block_table, query_start, seq_lens, q_latent, q_rope, scale, lse: see the reference,
                `reference.latent_attention.attend`.
            ring, page_lens: of the requests, and `reference.latent_attention.page_lens`; None: pages have all tokens.

        Returns:
            fp32 [tokens, heads, rank]; rows of no request are 0.
        """
        output = torch.zeros(q_latent.shape)
        query = torch.cat((q_latent.float(), q_rope.float()), dim=-1).mul_(scale)
        starts = query_start.tolist()
        in_pages = seq_lens if page_lens is None else page_lens
        for request, lengths in enumerate(zip(seq_lens.tolist(), in_pages.tolist(), strict=True)):
            rows = slice(starts[request], starts[request + 1])
            if rows.start < rows.stop:
                rings = None if ring is None else (Cache.of(ring.cache), ring.block_table[request])
                found, found_lse = self._attend_request(cache, block_table[request], lengths, query[rows], rings)
                output[rows] = found
                if lse is not None:
                    lse[rows] = found_lse
        return output

    def _attend_request(
        self, cache: torch.Tensor, blocks: torch.Tensor, lengths: tuple[int, int], query: torch.Tensor,
        ring: tuple[Cache, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return the output, fp32 [query tokens, heads, rank], and lse, fp32 [query tokens, heads], of scaled queries
        [query tokens, heads, rank + rope_dim]. `lengths`: of the request, and of what its last query reads in pages."""
        count, heads, channels = query.shape
        end, page_len = lengths
        own = torch.arange(end - count, end)[:, None]
        ring_from = own + 1 - (end - page_len)  # where each query goes on in the ring
        spans: list[tuple[int, int, bool]] = [(0, page_len, False)]
        if ring is not None:
            spans.append((max(0, page_len - count + 1), end, True))
        parts = []
        for low, high, in_ring in spans:
            for start in range(low // MICRO_BLOCK * MICRO_BLOCK, high, PIECE):
                stop = min(start + PIECE, high)
                rows = self._scratch(stop - start)
                of_ring, ring_blocks = ring if ring is not None and in_ring else (None, None)
                self.read(cache, blocks, start, rows, of_ring, ring_blocks, low)
                position = torch.arange(start, stop)
                hidden = (position > own) | (position < ring_from) if in_ring else position >= ring_from
                parts.append(self._attend_piece(query.view(-1, channels), rows, hidden, in_ring=in_ring))
        return self._merge(parts, count, heads)

    def _attend_piece(
        self, query: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor, *, in_ring: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums of latents by softmax weights [queries, rank], and the weights' lse [queries]. `hidden`: bool
        [query tokens, rows], which of the rows their queries do not see."""
        scores = query @ rows.T
        if hidden.any():
            scores.view(len(hidden), -1, len(rows)).masked_fill_(hidden[:, None], float("-inf"))
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.clamp(min=-3e38)[:, None]).exp_()
        found = weights @ rows[:, : self.codec.rank]
        return found.div_(self.gain) if in_ring else found, lse

    @staticmethod
    def _merge(
        parts: list[tuple[torch.Tensor, torch.Tensor]], count: int, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = parts[0]
        if len(parts) > 1:
            lses = torch.stack([part_lse for _, part_lse in parts])
            lse = lses.logsumexp(0)
            weights = (lses - lse.clamp(min=-3e38)).exp()
            output = sum((weight[:, None] * part for weight, (part, _) in zip(weights, parts, strict=True)), 0 * output)
        return output.view(count, heads, -1), lse.view(count, heads)

    def _scratch(self, tokens: int) -> torch.Tensor:
        """Return rows for so many tokens, which the next call returns again."""
        if len(self._rows) < tokens:
            self._rows = torch.empty(tokens, self._rows.shape[1])
        return self._rows[:tokens]
