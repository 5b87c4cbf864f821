"""Store new tokens on a CPU, into pages and the ring: the host side of `pages/store.h`."""

from __future__ import annotations

import ctypes
import threading

import torch

from ...codecs.latent import LatentCodec
from ...codecs.pages import PagedCodec
from .compiler import Target
from .layer import ELEMENT_TYPES, PAGES, Cache, Int, KnownCaches, Layer, Pointer, function_of, layer_of, load_for


class Store(ctypes.Structure):
    """`struct Store` of pages/store.h."""

    _fields_ = (
        ("layer", ctypes.POINTER(Layer)),
        ("pages", Cache),
        ("ring", Cache),
        ("slots", Pointer),
        ("ring_slots", Pointer),
        ("positions", Pointer),
        ("vectors", Pointer * 2),
        ("token_stride", ctypes.c_int64 * 2),
        ("head_stride", ctypes.c_int64 * 2),
        ("tokens", Int),
        ("ring_tokens", Int),
        ("kv_heads", Int),
        ("dtype", Int),
        ("threads", Int),
    )


class CpuStore:
    """Stores the tokens of a layer; the bytes equal those of `PagedCodec.write` and of `codecs.ring.write`. For
    latents, `key` and `value` are the latent and its RoPE channels.

    Args:
        codec: of the layer.
        target: None: the best of this processor.

    Raises:
        BuildError: `pages/pages.cpp` cannot be compiled.
        ValueError: the codec is not served: see `cpp_lacks`.
    """

    def __init__(self, codec: PagedCodec | LatentCodec, *, target: Target | None = None) -> None:
        self.layer = layer_of(codec)
        self.needs_positions = isinstance(codec, PagedCodec) and codec.needs_positions
        self.function = function_of(load_for(PAGES, codec, target), "pk_store", Store)
        self._call, self._lock, self._caches = Store(layer=ctypes.pointer(self.layer)), threading.Lock(), KnownCaches()
        self._layout: tuple[object, ...] = ()

    def __call__(
        self,
        cache: torch.Tensor | None,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor | None = None,
        ring: torch.Tensor | None = None,
        ring_slots: torch.Tensor | None = None,
    ) -> None:
        """Store tokens.

        Args:
            cache: uint8 [blocks, KV heads, block_size, slot_bytes]; None: only the ring is written.
            key, value: fp32, bf16 or fp16 [tokens or more, KV heads, head_dim] and [tokens or more, KV heads,
                value_dim], a head's channels contiguous.
            slots: int64 [tokens], block * block_size + offset, distinct; negative ones are skipped. Among the others,
                the tokens of one micro-block must follow one another.
            positions: int64 [tokens], each token's place in its sequence; may be None where means do not depend on it.
            ring: uint8 [blocks, KV heads, block_size, ring_slot_bytes]; None: only pages are written.
            ring_slots: int32 [up to tokens], of the first tokens; negative ones are skipped. None: only pages are
                written.
        """
        with self._lock:
            call, layout = self._call, (key.dtype, value.dtype, key.stride(), value.stride())
            if layout != self._layout:
                self._set_vectors(key, value)
                self._layout = layout
            tokens = slots.shape[0]  # len() of a tensor takes ten times as long
            assert slots.dtype == torch.int64 and slots.is_contiguous(), (slots.dtype, slots.stride())
            assert tokens <= key.shape[0] and tokens <= value.shape[0], (key.shape, value.shape, slots.shape)
            call.pages = Cache() if cache is None else self._caches.of("pages", cache)
            call.slots, call.tokens, call.threads = slots.data_ptr(), tokens, torch.get_num_threads()
            call.vectors[0], call.vectors[1], call.kv_heads = key.data_ptr(), value.data_ptr(), key.shape[1]
            if self.needs_positions:
                assert positions is not None, "means depend on the tokens' positions"
                assert positions.dtype == torch.int64 and positions.is_contiguous() and positions.shape[0] >= tokens
                call.positions = positions.data_ptr()
            call.ring_tokens = 0
            if ring is not None and ring_slots is not None:
                assert ring_slots.dtype == torch.int32 and ring_slots.is_contiguous() and ring_slots.shape[0] <= tokens
                call.ring, call.ring_slots = self._caches.of("ring", ring), ring_slots.data_ptr()
                call.ring_tokens = ring_slots.shape[0]
            if self.function(call):
                raise MemoryError(f"no memory to store {tokens} tokens")

    def _set_vectors(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Set the fields that depend on their dtype and strides."""
        assert key.dtype == value.dtype and key.stride(2) == value.stride(2) == 1, (key.dtype, key.stride())
        assert (key.shape[2], value.shape[2]) == tuple(self.layer.dim), (key.shape, value.shape)
        self._call.dtype = ELEMENT_TYPES[key.dtype]
        for role, vectors in enumerate((key, value)):
            self._call.token_stride[role], self._call.head_stride[role] = vectors.stride()[:2]
