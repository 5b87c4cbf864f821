"""One layer's ring buffer in a step: what attention reads there, in the kernels and in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.forward_context import get_forward_context

from ..codecs.ring import Ring, read, round_trip
from ..reference.attention import RecentVectors

if TYPE_CHECKING:
    from ..codecs.pages import PagedCodec
    from .layer import WindowLayer
    from .metadata import WindowMetadata


@dataclass
class WindowStep:
    """The ring of `layer` in the step that is under way. `is_shared`: the reader is another layer, which shares the
    cache of `layer`'s packed layer."""

    layer: WindowLayer
    metadata: WindowMetadata
    is_shared: bool

    @classmethod
    def of(cls, layer: WindowLayer | None, is_shared: bool) -> WindowStep | None:
        """Return the ring of `layer` in vLLM's current forward context; None: the layer has no window."""
        if layer is None:
            return None
        metadata = get_forward_context().attn_metadata
        assert isinstance(metadata, dict), "vLLM's micro-batches are not supported"
        return cls(layer, metadata[layer.layer_name], is_shared)

    def ring(self, first: int, end: int) -> Ring:
        """Return the ring as attention of the batch's requests `first` .. `end` - 1 reads it."""
        return Ring(self.layer.kv_cache, *self.metadata.of_requests(first, end), self.layer.window)

    def recent_vectors(
        self, codec: PagedCodec, key: torch.Tensor | None, value: torch.Tensor | None, positions: torch.Tensor,
        query_starts: list[int], context: list[int], first: int,
    ) -> dict[int, RecentVectors]:  # fmt: skip
        """Return for each request from `first` on the vectors in its ring, followed by those of its new tokens.

        To be asked before the new ones are written, once by each layer. Layers that share a ring get the vectors that
        its own layer read: `metadata`, which ends with the step, keeps them until the last of these layers has asked,
        and keeps nothing where no layer shares the ring.

        Args:
            codec: of the layer.
            key, value: [tokens, KV heads, head_dim] of the batch; not looked at in a layer that shares the ring.
            positions: int64 [tokens], of each in its request.
            query_starts: first row of each request, and the end of the last.
            context: tokens of each request, the batch's included.
            first: index of a request.
        """
        if self.is_shared:
            return self.metadata.borrow(self.layer.layer_name)
        assert key is not None and value is not None
        rows = slice(query_starts[first], query_starts[-1])
        prepared = codec.prepare(key[rows], value[rows], positions[rows])
        own_key, own_value = (round_trip(x).transpose(0, 1) for x in prepared)
        own = codec.whole(own_key, own_value, positions[rows])
        found = {}
        for request in range(first, len(context)):
            start, end = (query_starts[i] - rows.start for i in (request, request + 1))
            found[request] = self._of_request(codec, request, context[request], [x[:, start:end] for x in own])
        self.metadata.lend(self.layer.layer_name, found, self.layer.sharers)
        return found

    def _of_request(self, codec: PagedCodec, request: int, seq_len: int, own: list[torch.Tensor]) -> RecentVectors:
        cache, table = self.layer.kv_cache, self.metadata.block_table[request]
        start = seq_len - own[0].shape[1]
        first = min(int(self.metadata.first[request]), start)
        positions = torch.arange(first, start, device=cache.device)
        slots = table[positions // cache.shape[2]].long() * cache.shape[2] + positions % cache.shape[2]
        held_key, held_value = (x.transpose(0, 1) for x in read(cache, slots))
        held = codec.whole(held_key, held_value, positions)
        key, value = (torch.cat(parts, dim=1) for parts in zip(held, own, strict=True))
        return RecentVectors(first, self.layer.window, key, value)
