"""Every write of a layer's tokens: into pages, and into the ring of the recent window.

A token's page is written before attention, always. Its ring, too, but of prompts that continue: these read there what
it had before, so their tokens follow behind their attention (`store_rest`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..codecs.ring import write as write_ring
from .step import StepKey

if TYPE_CHECKING:
    from ..codecs.latent import LatentCodec
    from ..codecs.pages import PagedCodec
    from ..kernels.cpu.store import CpuStore
    from ..window.step import WindowStep
    from .latent.metadata import LatentMetadata
    from .metadata import Batch
    from .protocols import StoreKernel


class PairStore:
    """The writes of a layer of pairs. Layers of one `kind`, that of their decode kernel, share the steps."""

    def __init__(self, kernel: StoreKernel, kind: Hashable) -> None:
        self.kernel, self.kind = kernel, kind

    def store(self, batch: Batch, decodes: int, decode_step: Any) -> None:
        """Write the batch's tokens into their pages, and into their rings those of the first `decodes` requests, or all
        if the other requests are new; rotate the queries of `decode_step`, the decodes', in the same launch."""
        metadata, window, tokens = batch.metadata, batch.window, batch.metadata.num_actual_tokens
        assert batch.key is not None and batch.value is not None
        in_ring = 0
        if window:
            in_ring = tokens if metadata.has_new_prompts(decodes) else metadata.query_starts[decodes]

        def make() -> Any:
            ring_slots = window.metadata.slots[:in_ring] if window and in_ring else None
            where = metadata.slot_mapping[:tokens], metadata.positions[:tokens], ring_slots
            return self.kernel.prepare(*where, decode_step)

        step = metadata.steps.get(StepKey("store", self.kind, decodes, window.metadata if window else None), make)
        ring = window.layer.kv_cache if window and in_ring else None
        self.kernel.write(step, batch.cache, batch.key, batch.value, ring, batch.query)

    def store_rest(self, batch: Batch, first: int) -> None:
        """Write the tokens of the requests from `first` on into their rings, unless `store` has."""
        metadata, window = batch.metadata, batch.window
        if window is None or metadata.has_new_prompts(first):
            return
        assert batch.key is not None and batch.value is not None
        rows, slots = slice(metadata.query_starts[first], metadata.num_actual_tokens), window.metadata.slots

        def make() -> Any:
            return self.kernel.prepare(metadata.slot_mapping[rows], metadata.positions[rows], slots[rows])

        step = metadata.steps.get(StepKey("ring", self.kind, first, window.metadata), make)
        self.kernel.write(
            step, batch.cache, batch.key[rows], batch.value[rows], window.layer.kv_cache, only_ring=True
        )  # fmt: skip


class LatentStore:
    """The writes of a layer of latents."""

    def __init__(self, kernel: StoreKernel) -> None:
        self.kernel = kernel

    def store(
        self, cache: torch.Tensor, slots: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor,
        window: WindowStep | None, metadata: LatentMetadata | None,
    ) -> None:  # fmt: skip
        """Write tokens into their pages, and into their rings those of decodes, or all if all prompts are new. See
        `StoreKernel`. `window`, `metadata`: of the batch, or None."""
        ring = ring_slots = None
        if window is not None and metadata is not None:
            count = metadata.num_actual_tokens if metadata.has_new_prompts else metadata.num_decode_tokens
            ring, ring_slots = window.layer.kv_cache, window.metadata.slots[:count]
        self.kernel.write(self.kernel.prepare(slots, None, ring_slots), cache, latent, rope, ring)

    def store_rest(
        self, cache: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, window: WindowStep | None,
        metadata: LatentMetadata,
    ) -> None:  # fmt: skip
        """Write the tokens of prompts, `latent` and `rope`, into their rings, unless `store` has."""
        if window is None or metadata.has_new_prompts:
            return
        slots = window.metadata.slots[metadata.num_decode_tokens : metadata.num_actual_tokens]
        step = self.kernel.prepare(slots, None, slots)
        self.kernel.write(step, cache, latent, rope, window.layer.kv_cache, only_ring=True)


@dataclass(frozen=True)
class NewTokens:
    """The step of tokens whose kernel takes them as they are: see `StoreKernel.prepare`."""

    slots: torch.Tensor
    positions: torch.Tensor | None
    ring_slots: torch.Tensor | None


class _TakesTokens:
    """The part of a `StoreKernel` that has nothing to prepare: no launch arguments, no queries to rotate."""

    def prepare(
        self, slots: torch.Tensor, positions: torch.Tensor | None = None, ring_slots: torch.Tensor | None = None,
        decodes: Any = None,
    ) -> NewTokens | None:  # fmt: skip
        """See `StoreKernel`."""
        return NewTokens(slots, positions, ring_slots) if len(slots) else None

    def rotate(self, query: torch.Tensor, decodes: Any) -> None:
        """Do nothing: attention rotates queries."""


class ReferencePairStore(_TakesTokens):
    """Stores pairs in PyTorch."""

    def __init__(self, codec: PagedCodec) -> None:
        self.codec = codec

    def write(
        self, step: NewTokens | None, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        ring: torch.Tensor | None = None, query: torch.Tensor | None = None, *, only_ring: bool = False,
    ) -> None:  # fmt: skip
        """See `StoreKernel`."""
        if step is None:
            return
        count = len(step.slots)
        if not only_ring:
            self.codec.write(cache, step.slots, key[:count], value[:count], step.positions)
        if ring is not None and step.ring_slots is not None and step.positions is not None:
            count = len(step.ring_slots)
            write_ring(ring, step.ring_slots, *self.codec.prepare(key[:count], value[:count], step.positions[:count]))


class LibraryPairStore(_TakesTokens):
    """Stores pairs by the C++ library of `kernels/cpu`."""

    def __init__(self, library: CpuStore) -> None:
        self.library = library

    def write(
        self, step: NewTokens | None, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        ring: torch.Tensor | None = None, query: torch.Tensor | None = None, *, only_ring: bool = False,
    ) -> None:  # fmt: skip
        """See `StoreKernel`."""
        if step is not None:
            pages = None if only_ring else cache
            self.library(pages, key, value, step.slots, step.positions, ring, step.ring_slots)


class ReferenceLatentStore(_TakesTokens):
    """Stores latents in PyTorch."""

    def __init__(self, codec: LatentCodec) -> None:
        self.codec = codec

    def write(
        self, step: NewTokens | None, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        ring: torch.Tensor | None = None, query: torch.Tensor | None = None, *, only_ring: bool = False,
    ) -> None:  # fmt: skip
        """See `StoreKernel`."""
        if step is None:
            return
        if not only_ring:
            self.codec.write(cache, step.slots, key, value)
        if ring is not None and step.ring_slots is not None:
            count = len(step.ring_slots)
            self.codec.write_ring(ring, step.ring_slots, key[:count], value[:count])
