"""Every write of a layer's tokens: into pages, and into the ring of the recent window.

A token's page is always written before attention. The ring is, too, except for prompts that continue: their attention
reads the ring's earlier tokens, so their own tokens are written after it (`store_rest`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, cast

import torch

from ..codecs.ring import write as write_ring
from .protocols import NewTokens, StoreKernel
from .step import StepKey

if TYPE_CHECKING:
    from ..codecs.latent import LatentCodec
    from ..codecs.pages import PagedCodec
    from ..codecs.ring import Ring
    from ..window.step import WindowStep
    from .latent.metadata import LatentMetadata
    from .metadata import Batch
    from .sparse.metadata import SparseLatentMetadata


class PairStore:
    """The writes of a layer of pairs. Layers whose decode kernels have one `kind` share the steps."""

    def __init__(self, kernel: StoreKernel, kind: Hashable) -> None:
        self.kernel, self.kind = kernel, kind

    def store(self, batch: Batch, decodes: int, decode_step: Any) -> None:
        """Write the batch's tokens into their pages, and the tokens of the first `decodes` requests (of all, if the
        other requests are new) into their rings. Rotate the queries of `decode_step`, the decodes' step, in the same
        launch."""
        metadata, window, tokens = batch.metadata, batch.window, batch.metadata.num_actual_tokens
        assert batch.key is not None and batch.value is not None
        in_ring = 0
        if window:
            is_all = decodes == len(metadata.context) or metadata.has_new_prompts(decodes)
            in_ring = tokens if is_all else metadata.query_starts[decodes]

        def make() -> Any:
            ring_slots = window.metadata.slots[:in_ring] if window and in_ring else None
            where = metadata.slot_mapping[:tokens], metadata.positions[:tokens], ring_slots
            return self.kernel.prepare(NewTokens(*where, decode_step))

        step = metadata.steps.get(StepKey("store", self.kind, decodes, window.metadata if window else None), make)
        ring = window.layer.kv_cache if window and in_ring else None
        self.kernel.write(step, batch.cache, batch.key, batch.value, ring, batch.query)

    def write_in_graph(self, step: Any, batch: Batch, ring: Ring | None) -> None:
        """Write the tokens of `step`, made by `kernel.prepare`, where only the device knows the batch."""
        assert batch.key is not None and batch.value is not None
        of_ring = None if ring is None else ring.cache
        self.kernel.write(step, batch.cache, batch.key, batch.value, of_ring, batch.query)

    def store_rest(self, batch: Batch, first: int) -> None:
        """Write the tokens of the requests from `first` on into their rings, unless `store` has."""
        metadata, window = batch.metadata, batch.window
        if window is None or metadata.has_new_prompts(first):
            return
        assert batch.key is not None and batch.value is not None
        rows, slots = slice(metadata.query_starts[first], metadata.num_actual_tokens), window.metadata.slots

        def make() -> Any:
            where = metadata.slot_mapping[rows], metadata.positions[rows], slots[rows]
            return self.kernel.prepare(NewTokens(*where, only_ring=True))

        step = metadata.steps.get(StepKey("ring", self.kind, first, window.metadata), make)
        self.kernel.write(step, batch.cache, batch.key[rows], batch.value[rows], window.layer.kv_cache)


class LatentStore:
    """The writes of a layer of latents. Layers whose decode kernels have one `kind` share the steps."""

    def __init__(self, kernel: StoreKernel, kind: Hashable) -> None:
        self.kernel, self.kind = kernel, kind

    def store(
        self, cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor,
        window: WindowStep | None, metadata: LatentMetadata | SparseLatentMetadata | None,
    ) -> None:  # fmt: skip
        """Write tokens into their pages, and decodes' tokens (all tokens, if all prompts are new) into their rings.

        `cache`, `latent`, `rope`: see `StoreKernel.write`. `slots`: int64 [tokens]. `window`, `metadata`: of the batch,
        or None; without metadata no other layer shares the step.
        """
        ring = ring_slots = None
        if window is not None:
            metadata = cast("LatentMetadata", metadata)
            count = metadata.num_actual_tokens if metadata.has_new_prompts else metadata.num_decode_tokens
            ring, ring_slots = window.layer.kv_cache, window.metadata.slots[:count]

        def make() -> Any:
            return self.kernel.prepare(NewTokens(slots, ring_slots=ring_slots))

        # vLLM passes slots to each layer. Layers with the same metadata get the same slots, though vLLM does not
        # document it.
        kind = self.kind, slots.data_ptr(), len(slots)
        key = StepKey("store", kind, window=window.metadata if window else None)
        step = make() if metadata is None else metadata.steps.get(key, make)
        self.kernel.write(step, cache, latent, rope, ring)

    def store_rest(
        self, cache: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, window: WindowStep | None,
        metadata: LatentMetadata,
    ) -> None:  # fmt: skip
        """Write the tokens of prompts into their rings, unless `store` has. `latent`, `rope`: [tokens, rank] and
        [tokens, rope_dim], of prompts alone."""
        if window is None or metadata.has_new_prompts:
            return
        slots = window.metadata.slots[metadata.num_decode_tokens : metadata.num_actual_tokens]

        def make() -> Any:
            return self.kernel.prepare(NewTokens(slots, ring_slots=slots, only_ring=True))

        step = metadata.steps.get(StepKey("ring", self.kind, window=window.metadata), make)
        self.kernel.write(step, cache, latent, rope, window.layer.kv_cache)


class FunctionStore(StoreKernel):
    """Stores tokens by a function that takes them as they are: the C++ library's `CpuStore`, or one of the functions
    below.

    `function` takes the pages (None: only the ring is written), key, value, slots, positions, ring and ring slots.
    """

    bound = None

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def write(
        self, step: NewTokens | None, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        ring: torch.Tensor | None = None, query: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if step is not None:
            pages = None if step.only_ring else cache
            self.function(pages, key, value, step.slots, step.positions, ring, step.ring_slots)


def reference_pair_store(codec: PagedCodec) -> FunctionStore:
    """Return what stores pairs in PyTorch."""

    def store(pages: Any, key: Any, value: Any, slots: Any, positions: Any, ring: Any, ring_slots: Any) -> None:
        if pages is not None:
            codec.write(pages, slots, key[: len(slots)], value[: len(slots)], positions)
        if ring is not None:
            rows = slice(len(ring_slots))
            write_ring(ring, ring_slots, *codec.prepare(key[rows], value[rows], positions[rows]))

    return FunctionStore(store)


def reference_latent_store(codec: LatentCodec) -> FunctionStore:
    """Return what stores latents in PyTorch."""

    def store(pages: Any, latent: Any, rope: Any, slots: Any, _positions: Any, ring: Any, ring_slots: Any) -> None:
        if pages is not None:
            codec.write(pages, slots, latent, rope)
        if ring is not None:
            codec.write_ring(ring, ring_slots, latent[: len(ring_slots)], rope[: len(ring_slots)])

    return FunctionStore(store)
