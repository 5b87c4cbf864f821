"""Attention of a layer whose tokens are all in this rank's pages."""

from __future__ import annotations

from typing import Any

import torch

from ..codecs.ring import write as write_ring
from ..window.step import WindowStep
from .layer_attention import LayerAttention
from .metadata import PackedMetadata


class PlainAttention(LayerAttention):
    """Stores a batch, attends to its decodes on the fused route and to the rest by prefill or in PyTorch."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        metadata: PackedMetadata, output: torch.Tensor, window: WindowStep | None = None, *, shares_cache: bool = False,
    ) -> None:  # fmt: skip
        """Store a batch and attend.

        Args:
            query: [tokens, query heads, head_dim], fp16, bf16 or fp32.
            key, value: [tokens, KV heads, head_dim] and [tokens, KV heads, value_dim], same dtype.
            kv_cache: uint8 [blocks, KV heads, block_size, slot_bytes].
            metadata: of the batch, its decodes first.
            output: [tokens, query heads, value_dim], filled.
            window: the layer's ring in this step; None: there is none.
            shares_cache: whether the layer reads another's pages; then `key` and `value` are not looked at.
        """
        decodes = self.fused_decodes(metadata, query.dtype)
        decode_step = self.decode_step(metadata, window) if decodes else None
        if not shares_cache:
            self.store(query, key, value, kv_cache, metadata, window, decodes, decode_step)
        if decode_step is not None:
            assert self.fused is not None
            if shares_cache:
                self.fused.rotate(query, decode_step)
            ring = window.ring(0, decodes) if window else None
            self.fused.attend(kv_cache, decode_step, output, ring, query)
        if decodes == len(metadata.context):
            return
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a prefill is scheduled on the host; no CUDA graph can hold it")
        if self.prefill is not None:
            own_key, own_value = (None, None) if shares_cache else (key, value)
            ring = None
            if window and not shares_cache and not metadata.has_new_prompts(decodes):
                ring = window.ring(decodes, len(metadata.context))
            self.prefill.attend(query, own_key, own_value, kv_cache, metadata, decodes, output, ring)
        else:
            self.attend_in_pytorch(query, key, value, kv_cache, metadata, window, decodes, output)
        if window and not shares_cache:
            self._store_in_ring(key, value, kv_cache, metadata, window, decodes)

    def _store_in_ring(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: PackedMetadata,
        window: WindowStep, first: int,
    ) -> None:  # fmt: skip
        """Write the tokens of the requests from `first` on into their rings, unless `store` has."""
        rows = slice(metadata.query_starts[first], metadata.num_actual_tokens)
        ring, fused = window.layer.kv_cache, self.fused
        if fused is None:
            slots = window.metadata.slots[rows]
            write_ring(ring, slots, *self.codec.prepare(key[rows], value[rows], metadata.positions[rows]))
        elif not metadata.has_new_prompts(first):

            def make() -> Any:
                where = (metadata.slot_mapping[rows], metadata.positions[rows], window.metadata.slots[rows])
                return fused.store_step(*where)

            step = self.once_a_step(metadata, window, ("ring", first), make)
            fused.store(kv_cache, key[rows], value[rows], step, ring, only_ring=True)
