"""Latents on a CPU: their store and reads, by `pages/pages.cpp`. Decodes: `latent_decode.py`."""

from __future__ import annotations

import ctypes

import torch

from ...codecs.latent import LatentCodec
from ...layout import MICRO_BLOCK
from .compiler import Target
from .gather import Gather
from .layer import ELEMENT_TYPES, PAGES, Cache, function_of, layer_of, load_for
from .store import Store


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
        self.codec, self.layer = codec, layer_of(codec)
        library = load_for(PAGES, codec, target)
        self._store, self._gather = function_of(library, "pk_store", Store), function_of(library, "pk_gather", Gather)

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

    def read(self, cache: torch.Tensor, blocks: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Fill rows with stored latents and RoPE channels of a request, as `LatentCodec.read` has them.

        Args:
            cache: uint8 [blocks, block_size, slot_bytes].
            blocks: int32 [blocks], the request's row of the block table.
            first: the token of the first row, a multiple of 16.
            rows: fp32, bf16 or fp16 [tokens, rank + rope_dim], the last dimension contiguous.
        """
        assert first % MICRO_BLOCK == 0 and blocks.dtype == torch.int32 and blocks.stride(0) == 1, (first, blocks.dtype)
        assert rows.stride(1) == 1 and rows.shape[1] == sum(self.layer.dim), (rows.stride(), rows.shape)
        call = Gather(
            layer=ctypes.pointer(self.layer), pages=Cache.of(cache.unsqueeze(1)), block_table=blocks.data_ptr(),
            first=first, end=first + len(rows), kv_heads=1, dtype=ELEMENT_TYPES[rows.dtype],
            threads=torch.get_num_threads(),
        )  # fmt: skip
        call.vectors[0], call.token_stride[0] = rows.data_ptr(), rows.stride(0)
        self._gather(call)
