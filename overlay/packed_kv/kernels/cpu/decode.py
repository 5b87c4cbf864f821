"""Decode attention of a layer on a CPU: `attend/` for its layout, and what it is called with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

from ...codecs.pages import PagedCodec
from ...codecs.ring import Ring
from ..checks import check_int32
from .build import Program
from .compiler import Target
from .jobs import Jobs, Largest
from .layer import ELEMENT_TYPES, Cache, Layer, Pointer, layer_of, load_for

PAIRS, LATENTS = Program("attend/pairs.cpp"), Program("attend/latents.cpp")
_NUMBER, _FLOAT = ctypes.c_int64, ctypes.c_double


class DecodeOptions(Protocol):
    """Options of a layer's attention, as `reference.attention.AttentionOptions` has them."""

    @property
    def scale(self) -> float: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def logits_soft_cap(self) -> float | None: ...
    @property
    def sinks(self) -> torch.Tensor | None: ...


class Arguments(ctypes.Structure):
    """`Arguments` of attend/arguments.h."""

    _fields_ = (
        ("layer", ctypes.POINTER(Layer)), ("pages", Cache), ("ring", Cache),
        ("requests", _NUMBER), ("block_table", Pointer), ("block_table_stride", _NUMBER),
        ("query_start", Pointer), ("seq_lens", Pointer),
        ("query", Pointer), ("rope_query", Pointer), ("query_type", _NUMBER), ("query_stride", _NUMBER),
        ("query_head_stride", _NUMBER), ("rope_stride", _NUMBER), ("rope_head_stride", _NUMBER),
        ("output", Pointer), ("output_type", _NUMBER), ("output_stride", _NUMBER), ("output_head_stride", _NUMBER),
        ("lse", Pointer), ("kv_heads", _NUMBER), ("group", _NUMBER), ("scale", _FLOAT), ("soft_cap", _FLOAT),
        ("sliding_window", _NUMBER), ("sinks", Pointer), ("constant", Pointer),
        ("ring_table", Pointer), ("ring_table_stride", _NUMBER), ("ring_first", Pointer), ("ring_window", _NUMBER),
        ("threads", _NUMBER), ("workspace", Pointer),
    )  # fmt: skip

    @classmethod
    def of(
        cls, layer: Layer, cache: torch.Tensor, block_table: torch.Tensor, query_start: torch.Tensor,
        seq_lens: torch.Tensor, query: torch.Tensor, output: torch.Tensor, ring: Ring | None,
    ) -> Arguments:  # fmt: skip
        """Return what pairs and latents are both called with. Tensors of requests are contiguous int32."""
        check_int32(block_table)
        assert query.stride(2) == output.stride(2) == 1, (query.stride(), output.stride())
        call = cls(
            layer=ctypes.pointer(layer), pages=Cache.of(cache), requests=seq_lens.shape[0],
            block_table=block_table.data_ptr(), block_table_stride=block_table.stride(0),
            query_start=query_start.data_ptr(), seq_lens=seq_lens.data_ptr(),
            query=query.data_ptr(), query_type=ELEMENT_TYPES[query.dtype], query_stride=query.stride(0),
            query_head_stride=query.stride(1), output=output.data_ptr(), output_type=ELEMENT_TYPES[output.dtype],
            output_stride=output.stride(0), output_head_stride=output.stride(1), kv_heads=1, group=query.shape[1],
            threads=torch.get_num_threads(),
        )  # fmt: skip
        if ring is not None:
            check_int32(ring.block_table, ring.first)
            call.ring, call.ring_window, call.ring_first = Cache.of(ring.cache), ring.window, ring.first.data_ptr()
            call.ring_table, call.ring_table_stride = ring.block_table.data_ptr(), ring.block_table.stride(0)
        return call


class CpuDecode:
    """Decode attention of one layer over packed pages, as `reference.attention.attend` has it.

    Outputs have the same bits whatever the number of threads and the other requests of a batch.

    Args:
        codec: of the layer, on the CPU.
        query_heads, kv_heads: of this rank.
        options: see `DecodeOptions`; `sinks` are read at each `bind`.
        target: what to compile for; None: the best of this processor.

    Raises:
        BuildError: there is no compiler, or it fails; one line.
    """

    def __init__(
        self,
        codec: PagedCodec,
        query_heads: int,
        kv_heads: int,
        options: DecodeOptions,
        *,
        target: Target | None = None,
    ) -> None:
        self.codec, self.query_heads, self.kv_heads, self.options = codec, query_heads, kv_heads, options
        self.layer = layer_of(codec)
        self._jobs = Jobs(load_for(PAIRS, codec, target), Arguments)

    def reserve(self, largest: Largest) -> None:
        """Take the workspace of the largest step."""
        group = self.query_heads // self.kv_heads
        self._jobs.reserve(Arguments(**self._options(), kv_heads=self.kv_heads, group=group), self.layer, largest)

    def bind(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        output: torch.Tensor,
        ring: Ring | None = None,
    ) -> Callable[[], None]:
        """Return a function that attends with requests' newest tokens over all of their cached tokens, the newest
        included. It reads the contents of these tensors at each call, and holds only until the next `bind`.

        Args:
            query: fp32, bf16 or fp16 [tokens or more, query heads, head_dim].
            cache: uint8 [blocks, KV heads, block_size, slot_bytes].
            block_table: int32 [requests, blocks].
            query_start: int32 [requests + 1], first row of each request in `query`.
            seq_lens: int32 [requests], tokens of each.
            output: fp32, bf16 or fp16 [tokens or more, query heads, value_dim]; the rows of these requests are filled,
                with 0 where a query sees nothing.
            ring: of these requests, the new tokens included; None: there is none.
        """
        key_dim, value_dim = self.codec.key.head_dim, self.codec.value.head_dim
        assert query.shape[1:] == (self.query_heads, key_dim) and query.stride(2) == 1, (query.shape, query.stride())
        assert output.shape[1:] == (self.query_heads, value_dim) and output.stride(2) == 1, (output.shape,)
        assert cache.shape[1] == self.kv_heads and cache.shape[3] == self.codec.slot_bytes, cache.shape
        query_start, seq_lens = query_start.to(torch.int32).contiguous(), seq_lens.to(torch.int32).contiguous()
        batch = Arguments.of(self.layer, cache, block_table, query_start, seq_lens, query, output, ring)
        batch.kv_heads, batch.group = self.kv_heads, self.query_heads // self.kv_heads
        for name, option in self._options().items():
            setattr(batch, name, option)
        sinks = None if self.options.sinks is None else self.options.sinks.detach().float().contiguous()
        batch.sinks = None if sinks is None else sinks.data_ptr()
        held = (self, query, cache, block_table, query_start, seq_lens, output, ring, sinks)
        self.layer.grow_means(self.codec, seq_lens)

        def attend(_held: object = held) -> None:
            self._jobs.run(batch)

        return attend

    def _options(self) -> dict[str, float]:
        options = self.options
        return {
            "scale": options.scale, "soft_cap": options.logits_soft_cap or 0.0,
            "sliding_window": options.sliding_window or 0,
        }  # fmt: skip
