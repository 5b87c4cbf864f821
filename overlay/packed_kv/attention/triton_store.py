"""The Triton kernels that store pairs, with the queries of decodes rotated in the same launch, and latents."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..codecs.latent import LatentCodec
from ..codecs.pages import PagedCodec
from ..kernels.triton.latent_store import StoreLatentsLaunch
from ..kernels.triton.launch import Launches, StepLaunch
from ..kernels.triton.rotate import QueryRotation, RotateQueryLaunch
from ..kernels.triton.store import StoreLaunch
from .protocols import NewTokens, RotatingStep, StoreKernel


@dataclass(frozen=True)
class StoreStep:
    """A step's launch, whether it leaves the pages alone, and whether it rotates queries."""

    launch: StepLaunch
    only_ring: bool
    rotates: bool = False


class TritonPairStore(StoreKernel):
    """Stores pairs of one layer, and rotates queries.

    Args:
        codec: of the layer, on a CUDA device.
        kv_heads: of this rank.
        rotation: of the layer's queries.
    """

    def __init__(self, codec: PagedCodec, kv_heads: int, rotation: QueryRotation) -> None:
        self.codec, self.kv_heads, self.rotation = codec, kv_heads, rotation
        self.bound: Launches = Launches()

    def prepare(self, tokens: NewTokens) -> StoreStep | None:
        if not len(tokens.slots):
            return None
        slots, decodes = tokens.slots, tokens.decodes
        assert tokens.positions is not None
        rotate = None if decodes is None else decodes.rotate
        step = StoreLaunch.step(self.codec, self.kv_heads, slots, tokens.positions, tokens.ring_slots, rotate)
        return StoreStep(step, tokens.only_ring, rotate is not None)

    def write(
        self, step: StoreStep | None, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        ring: torch.Tensor | None = None, query: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if step is None:
            return
        queries = None if query is None or not step.rotates else (query, self.rotation)
        read = key if queries is None else queries[0]
        of_ring = None if ring is None else (ring.data_ptr(), ring.stride())
        binding_key = (
            cache.data_ptr(), cache.stride(), of_ring, key.dtype, value.dtype, read.dtype,
            key.stride(), value.stride(), read.stride(),
        )  # fmt: skip
        launch = self.bound.get(
            ("store", ring is None, step.rotates, step.only_ring),
            binding_key,
            lambda: StoreLaunch(self.codec, cache, key, value, ring, queries, only_ring=step.only_ring),
        )
        grid, arguments = step.launch
        launch(grid, (key, value, read), arguments)

    def rotate(self, query: torch.Tensor, decodes: RotatingStep) -> None:
        if decodes.rotate is None:
            return
        binding_key = (query.stride(), query.dtype)
        launch = self.bound.get("rotate", binding_key, lambda: RotateQueryLaunch(query, self.kv_heads, self.rotation))
        grid, arguments = decodes.rotate.launch
        launch(grid, (query,), arguments)


class TritonLatentStore(StoreKernel):
    """Stores latents of one layer. `codec`: of the layer, on a CUDA device."""

    def __init__(self, codec: LatentCodec) -> None:
        self.codec = codec
        self.bound: Launches = Launches()

    def prepare(self, tokens: NewTokens) -> StoreStep | None:
        if not len(tokens.slots):
            return None
        step = StoreLatentsLaunch.step(self.codec, tokens.slots, tokens.ring_slots)
        return StoreStep(step, tokens.only_ring)

    def write(
        self, step: StoreStep | None, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        ring: torch.Tensor | None = None, query: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        if step is None:
            return
        of_ring = None if ring is None else (ring.data_ptr(), ring.stride())
        launch = self.bound.get(
            ("store", ring is None, step.only_ring),
            (cache.data_ptr(), cache.stride(), of_ring, key.stride(), value.stride(), key.dtype, value.dtype),
            lambda: StoreLatentsLaunch(self.codec, cache, key, value, ring, only_ring=step.only_ring),
        )
        grid, arguments = step.launch
        launch(grid, (key, value), arguments)
