"""Latents on a CPU: their store and reads, as vectors of one head. Decodes: `latent_decode.py`."""

from __future__ import annotations

import torch

from ...codecs.latent import LatentCodec
from .compiler import Target
from .gather import CpuGather
from .store import CpuStore


class CpuLatentPages:
    """Stores and reads one layer's latents.

    Args:
        codec: of the layer, on the CPU.
        target: None: the best of this processor.

    Raises:
        BuildError: a source cannot be compiled.
        ValueError: the codec is not served: see `cpp_lacks`.
    """

    def __init__(self, codec: LatentCodec, *, target: Target | None = None) -> None:
        self.codec = codec
        self._store, self._gather = CpuStore(codec, target=target), CpuGather(codec, target=target)

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
            slots: int64 [tokens], distinct; negative ones are skipped. Among the others, the tokens of one micro-block
                must follow one another.
            latent, rope: fp32, bf16 or fp16 [tokens or more, rank] and [tokens or more, rope_dim], a token's channels
                contiguous.
            ring: uint8 [blocks, 1, block_size, ring_slot_bytes]; None: only pages are written.
            ring_slots: int [up to tokens], of the first tokens; negative ones are skipped.
        """
        pages = None if cache is None else cache.unsqueeze(1)
        slots = slots.to(torch.int64).contiguous()
        ring_slots = None if ring_slots is None else ring_slots.to(torch.int32).contiguous()
        self._store(pages, latent.unsqueeze(1), rope.unsqueeze(1), slots, None, ring, ring_slots)

    def read(self, cache: torch.Tensor, blocks: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Fill rows with stored latents and RoPE channels of a request, as `LatentCodec.read` has them.

        Args:
            cache: uint8 [blocks, block_size, slot_bytes].
            blocks: int32 [blocks], the request's row of the block table.
            first: the token of the first row, a multiple of 16.
            rows: fp32, bf16 or fp16 [tokens, rank + rope_dim], the last dimension contiguous.
        """
        parts = rows.unsqueeze(1).split([self.codec.rank, self.codec.rope_dim], dim=-1)
        self._gather(cache.unsqueeze(1), blocks, first, first + len(rows), *parts)
