"""Read a request's prefix on a CPU, out of pages and ring: the host side of `pages/gather.h`."""

from __future__ import annotations

import ctypes

import torch

from ...codecs.latent import LatentCodec
from ...codecs.pages import PagedCodec
from ...codecs.ring import Ring
from ...layout import MICRO_BLOCK
from .compiler import Target
from .layer import ELEMENT_TYPES, PAGES, Cache, Int, Layer, Pointer, function_of, layer_of, load_for


class Gather(ctypes.Structure):
    """`struct Gather` of pages/gather.h."""

    _fields_ = (
        ("layer", ctypes.POINTER(Layer)),
        ("pages", Cache),
        ("ring", Cache),
        ("block_table", Pointer),
        ("ring_table", Pointer),
        ("vectors", Pointer * 2),
        ("token_stride", ctypes.c_int64 * 2),
        ("head_stride", ctypes.c_int64 * 2),
        ("first", Int),
        ("end", Int),
        ("ring_from", Int),
        ("kv_heads", Int),
        ("dtype", Int),
        ("threads", Int),
    )


class CpuGather:
    """Reads tokens of a layer as the model made them: equal to `PagedCodec.read` and `Codec.restore`, rounded once. For
    latents, `key` and `value` are parts of one row: the stored latent, and its RoPE channels.

    Args:
        codec: of the layer.
        target: None: the best of this processor.

    Raises:
        BuildError: `pages/pages.cpp` cannot be compiled.
        ValueError: the codec is not served: see `cpp_lacks`.
    """

    def __init__(self, codec: PagedCodec | LatentCodec, *, target: Target | None = None) -> None:
        self.layer = layer_of(codec)
        self.function = function_of(load_for(PAGES, codec, target), "pk_gather", Gather)

    def __call__(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        first: int,
        end: int,
        key: torch.Tensor,
        value: torch.Tensor,
        ring: Ring | None = None,
        ring_from: int = 0,
    ) -> None:
        """Read the tokens `first` .. `end` - 1 of a request.

        Args:
            cache: uint8 [blocks, KV heads, block_size, slot_bytes].
            block_table: int32 [blocks], of the request.
            first: a multiple of 16.
            end: at least `first`.
            key, value: fp32, bf16 or fp16 [end - first or more, KV heads, head_dim] and [end - first or more, KV heads,
                value_dim], a head's channels contiguous; filled.
            ring: the ring of this request alone, with all its tokens from `ring_from` on; None: only pages are read.
            ring_from: the token from which on the ring is read.
        """
        assert first % MICRO_BLOCK == 0 and first <= end <= first + min(len(key), len(value)), (first, end, key.shape)
        assert block_table.dtype == torch.int32 and block_table.is_contiguous(), (block_table.dtype, block_table.shape)
        assert -(-end // cache.shape[2]) <= len(block_table), (end, block_table.shape)
        assert key.dtype == value.dtype and key.stride(2) == value.stride(2) == 1, (key.dtype, key.stride())
        assert (key.shape[2], value.shape[2]) == tuple(self.layer.dim), (key.shape, value.shape)
        call = Gather(
            layer=ctypes.pointer(self.layer), pages=Cache.of(cache), block_table=block_table.data_ptr(), first=first,
            end=end, kv_heads=key.shape[1], dtype=ELEMENT_TYPES[key.dtype], threads=torch.get_num_threads(),
        )  # fmt: skip
        if ring is not None:
            table = ring.block_table[0]
            assert table.dtype == torch.int32 and table.is_contiguous() and ring_from >= int(ring.first[0])
            call.ring, call.ring_table, call.ring_from = Cache.of(ring.cache), table.data_ptr(), ring_from
        for role, vectors in enumerate((key, value)):
            call.vectors[role] = vectors.data_ptr()
            call.token_stride[role], call.head_stride[role] = vectors.stride()[:2]
        self.function(call)
