"""Makes the kernels of a layer, for engines and the self-test: its device's, where they serve it, else PyTorch's.

Kernels of a GPU import Triton, which the CPU platform may lack, so they are imported where they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..settings.options import read_options
from .choice import Limits
from .context_shard import UNSHARDED, ContextShard
from .latent.in_pytorch import ReferenceLatents
from .latent.kernels import LatentKernels, reference_kernels
from .layer import PairKernels
from .metadata import longest_decode
from .protocols import DecodeKernel, PrefillKernel, StoreKernel
from .sparse import in_pytorch as sparse_in_pytorch
from .sparse.layer import SparseKernels, SparseLayout
from .store import LatentStore, PairStore

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..codecs.latent import LatentCodec
    from ..codecs.pages import PagedCodec
    from ..formats import Format
    from ..reference.attention import AttentionOptions
    from .metadata import Batch
    from .prefill import FlashAttention
    from .sparse.hopper import HopperSparse

DeviceKernels = tuple[StoreKernel, DecodeKernel[Any, None] | None, PrefillKernel["Batch"] | None]
LEAST_SLICE = 64
"""Decodes whose picks the workspace holds together where they are gathered, however short the longest request: 151 MB
for 2,048 picks each."""


@dataclass(frozen=True)
class Engine:
    """What of an engine decides the kernels of its layers.

    `device`: where they run. `dtype`: of the model. `limits`: of decodes. `batch_tokens`, `request_tokens`: the most of
    a batch and of a request. `option`: `decode_kernel` of `--additional-config`. `number`: the engine's own.
    """

    device: torch.device
    dtype: torch.dtype
    limits: Limits
    batch_tokens: int
    request_tokens: int
    option: str
    number: int = 0

    @property
    def decode_tokens(self) -> int:
        """The most query tokens of a batch's decodes, drafts included."""
        return min(self.limits.max_requests * self.limits.longest_decode, self.batch_tokens)

    @classmethod
    def of(cls, config: VllmConfig, device: torch.device) -> Engine:
        model, scheduler = config.model_config, config.scheduler_config
        # vLLM makes two requests of a decode whose drafts begin a chunk.
        requests = scheduler.max_num_seqs * (2 if model.attention_chunk_size else 1)
        return cls(
            device=device,
            dtype=model.dtype,
            limits=Limits(longest_decode(config), requests),
            batch_tokens=scheduler.max_num_batched_tokens,
            request_tokens=model.max_model_len,
            option=read_options(config.additional_config).decode_kernel,
            number=id(config.compilation_config.static_forward_context),
        )


@dataclass(frozen=True)
class PairSizes:
    """A layer of pairs: its codec, K's format and channels, heads of this rank, options, and what is in this rank's
    pages. `flash_attention`: what prompts run on, on a GPU; None: PyTorch."""

    codec: PagedCodec
    fmt: Format
    head_dim: int
    query_heads: int
    kv_heads: int
    options: AttentionOptions
    shard: ContextShard = UNSHARDED
    flash_attention: FlashAttention | None = None


def pair_kernels(layer: PairSizes, engine: Engine) -> PairKernels:
    """Return the kernels of a layer of pairs."""
    store, decode, prefill = (pairs_on_cpu if engine.device.type == "cpu" else pairs_on_cuda)(layer, engine)
    writes = PairStore(store, None if decode is None else decode.kind)
    sizes = layer.codec, layer.query_heads, layer.kv_heads, layer.options
    return PairKernels(*sizes, writes, decode, prefill, layer.shard)


def pairs_on_cpu(layer: PairSizes, engine: Engine) -> DeviceKernels:
    """Return what stores, decodes and prefills on a CPU."""
    from . import cpu

    sizes = cpu.Sizes(max(engine.request_tokens, engine.batch_tokens), engine.dtype, engine.number)
    of_layer = layer.codec, layer.query_heads, layer.kv_heads, layer.options
    return cpu.find_kernels(layer.fmt, layer.head_dim, *of_layer, sizes, layer.shard)


def pairs_on_cuda(layer: PairSizes, engine: Engine) -> DeviceKernels:
    """Return what stores, decodes and prefills on a GPU."""
    from .decode import PairLayout, pair_kernel
    from .prefill import FlashPrefill
    from .triton_store import TritonPairStore

    of_ranks = layer.codec, layer.query_heads * layer.shard.ranks, layer.kv_heads, layer.options
    layout = PairLayout(*of_ranks, engine.limits, layer.shard)
    rotation, prefill = layout.rotation(), None
    store, decode = TritonPairStore(layer.codec, layer.kv_heads, rotation), pair_kernel(layout, rotation, engine.option)
    if layer.flash_attention is not None:
        most = engine.batch_tokens, engine.limits.max_requests
        prefill = FlashPrefill(*of_ranks, *most, layer.flash_attention, layer.shard)
    return store, decode, prefill


def latent_kernels(
    fmt: Format, codec: LatentCodec, heads: int, scale: float, constant: torch.Tensor | None, window: int,
    engine: Engine, *, is_shard: bool = False,
) -> LatentKernels:  # fmt: skip
    """Return the kernels of a layer of latents.

    Args:
        fmt: of the layer.
        codec, heads, scale, constant, window, is_shard: see `LatentLayout`.
        engine: see `Engine`.
    """
    if engine.device.type == "cpu":
        from .latent.cpu import find_kernels

        return find_kernels(fmt, codec, scale, constant, engine.dtype, is_shard=is_shard)
    if engine.device.type != "cuda" or engine.dtype == torch.float32:
        return reference_kernels(codec, ReferenceLatents(codec, scale, constant, is_shard=is_shard))
    return latents_on_cuda(codec, heads, scale, constant, window, engine, is_shard=is_shard)


def latents_on_cuda(
    codec: LatentCodec, heads: int, scale: float, constant: torch.Tensor | None, window: int, engine: Engine, *,
    is_shard: bool = False,
) -> LatentKernels:  # fmt: skip
    """Return the kernels of a layer of latents on a GPU; arguments are those of `latent_kernels`."""
    from .latent.decode import LatentLayout, latent_kernel
    from .latent.prefix import TritonLatentPrefix
    from .triton_store import TritonLatentStore

    sizes = heads, scale, engine.dtype, engine.limits
    decode = latent_kernel(LatentLayout(codec, *sizes, constant, window, is_shard=is_shard), engine.option)
    return LatentKernels(LatentStore(TritonLatentStore(codec), decode.kind), decode, TritonLatentPrefix(codec))


def sparse_kernels(layer: SparseLayout, engine: Engine, rows: int) -> SparseKernels:
    """Return the kernels of a layer of picked latents. `rows`: of the workspace, at least the tokens of the longest
    request."""
    if engine.device.type != "cuda":
        return sparse_in_pytorch.reference_kernels(layer)
    from .sparse.hopper import hopper_kernel

    by_cuda = hopper_kernel(layer, engine.option, engine.decode_tokens, engine.limits.longest_decode)
    if by_cuda is None:
        rows = max(rows, layer.picks * min(LEAST_SLICE, engine.limits.max_requests))
    return sparse_on_cuda(layer, by_cuda, rows, engine.batch_tokens)


def sparse_on_cuda(layer: SparseLayout, by_cuda: HopperSparse | None, rows: int, batch_tokens: int) -> SparseKernels:
    """Return the kernels of a layer of picked latents on a GPU. `by_cuda`: of decodes; None: FlashMLA attends to them.
    `rows`, `batch_tokens`: see `SparseWorkspace`."""
    from .sparse.flash import FlashDecodes, FlashPrompts, SparseWorkspace, TritonSinks
    from .sparse.rows import RowGather
    from .triton_store import TritonLatentStore

    gather = RowGather(layer.codec)
    workspace = SparseWorkspace(layer, rows, batch_tokens, () if by_cuda is None else by_cuda.partial)
    return SparseKernels(
        store=LatentStore(TritonLatentStore(layer.codec), layer.kind),
        decode=FlashDecodes(layer, gather) if by_cuda is None else by_cuda,
        prefill=FlashPrompts(layer, gather),
        prefix=gather,
        take=workspace.take,
        sinks=None if layer.sinks is None else TritonSinks(layer),
    )
