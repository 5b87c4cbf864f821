"""Makes the kernels of a layer, for engines and the self-test: the device's kernels where they serve the layer, else
PyTorch's.

Kernels of a GPU import Triton, which the CPU platform may lack, so each function imports what it makes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .latent.in_pytorch import ReferenceLatentPrefix
from .latent.kernels import LatentKernels, reference_kernels
from .layer import PairKernels
from .protocols import DecodeKernel, PrefillKernel, StoreKernel
from .sparse.layer import SparseKernels
from .store import LatentStore, PairStore, reference_latent_store

if TYPE_CHECKING:
    from ..formats import Format
    from .layouts import LatentLayout, PairLayout, SparseLayout
    from .limits import EngineLimits
    from .metadata import Batch
    from .prefill import FlashAttention
    from .sparse.hopper import HopperSparse

DeviceKernels = tuple[StoreKernel, DecodeKernel[Any, None] | None, PrefillKernel["Batch"] | None]
LEAST_SLICE = 64
"""Decodes whose gathered picks the workspace holds at a time, even if the longest request is shorter: 151 MB for 2,048
picks each."""


def pair_kernels(
    fmt: Format, layer: PairLayout, engine: EngineLimits, flash_attention: FlashAttention | None = None
) -> PairKernels:
    """Return the kernels of a layer of pairs of this format. `flash_attention`: the function that prompts run on, on a
    GPU; None: PyTorch."""
    if engine.device.type == "cpu":
        from . import cpu

        made: DeviceKernels = cpu.find_kernels(fmt, layer, engine)
    else:
        made = pairs_on_cuda(layer, engine, flash_attention)
    store, decode, prefill = made
    heads, writes = layer.query_heads // layer.shard.ranks, PairStore(store, None if decode is None else decode.kind)
    return PairKernels(layer.codec, heads, layer.kv_heads, layer.options, writes, decode, prefill, layer.shard)


def pairs_on_cuda(layer: PairLayout, engine: EngineLimits, flash_attention: FlashAttention | None) -> DeviceKernels:
    """Return what stores, decodes and prefills on a GPU."""
    from .decode import pair_kernel, rotation_of
    from .prefill import FlashPrefill
    from .triton_store import TritonPairStore

    rotation, prefill = rotation_of(layer), None
    if flash_attention is not None:
        sizes = layer.codec, layer.query_heads, layer.kv_heads, layer.options
        most = engine.limits.max_tokens, engine.limits.max_requests
        prefill = FlashPrefill(*sizes, *most, flash_attention, layer.shard)
    decode = pair_kernel(layer, rotation, engine.option)
    return TritonPairStore(layer.codec, layer.kv_heads, rotation), decode, prefill


def latent_kernels(fmt: Format, layer: LatentLayout, engine: EngineLimits) -> LatentKernels:
    """Return the kernels of a layer of latents of this format."""
    if engine.device.type == "cpu":
        from .latent.cpu import find_kernels

        return find_kernels(fmt, layer, engine)
    if engine.device.type != "cuda" or layer.dtype == torch.float32:
        return reference_kernels(layer)
    return latents_on_cuda(layer, engine)


def latents_on_cuda(layer: LatentLayout, engine: EngineLimits) -> LatentKernels:
    """Return the kernels of a layer of latents on a GPU."""
    from .latent.decode import latent_kernel
    from .latent.prefix import TritonLatentPrefix
    from .triton_store import TritonLatentStore

    decode = latent_kernel(layer, engine.option)
    store = LatentStore(TritonLatentStore(layer.codec), decode.kind)
    return LatentKernels(store, decode, TritonLatentPrefix(layer.codec))


def sparse_kernels(layer: SparseLayout, engine: EngineLimits, rows: int) -> SparseKernels:
    """Return the kernels of a layer of picked latents. `rows`: rows of the workspace, at least the tokens of the
    longest request."""
    if engine.device.type != "cuda":
        store = LatentStore(reference_latent_store(layer.codec), layer.kind)
        return SparseKernels(layer, store, ReferenceLatentPrefix(layer.codec))
    from .sparse.hopper import hopper_kernel

    by_cuda = hopper_kernel(layer, engine.option, engine.decode_tokens, engine.limits.longest_decode)
    if by_cuda is None:
        rows = max(rows, layer.picks * min(LEAST_SLICE, engine.limits.max_requests))
    return sparse_on_cuda(layer, by_cuda, rows, engine.limits.max_tokens)


def sparse_on_cuda(layer: SparseLayout, by_cuda: HopperSparse | None, rows: int, batch_tokens: int) -> SparseKernels:
    """Return the kernels of a layer of picked latents on a GPU. `by_cuda`: the CUDA kernel of decodes; None: FlashMLA
    attends to them. `rows`, `batch_tokens`: see `workspace_of`."""
    from .sparse.flash import FlashDecodes, FlashPrompts, RowGather, TritonSinks, workspace_of
    from .triton_store import TritonLatentStore

    gather = RowGather(layer.codec)
    return SparseKernels(
        layer=layer,
        store=LatentStore(TritonLatentStore(layer.codec), layer.kind),
        decode=FlashDecodes(layer, gather) if by_cuda is None else by_cuda,
        prefill=FlashPrompts(layer, gather),
        prefix=gather,
        take=workspace_of(layer, rows, batch_tokens, () if by_cuda is None else by_cuda.partial),
        sinks=None if layer.sinks is None else TritonSinks(layer),
    )
